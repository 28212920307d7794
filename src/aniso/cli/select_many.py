"""``aniso select --from`` an address: selection among many adapters, alone or with other workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aniso.addresses import Shard, is_remote, require_address, root_of
from aniso.cli import checks, show
from aniso.cli.select_inputs import Inputs
from aniso.cli.select_output import print_choice
from aniso.errors import UsageError, printable
from aniso.progress import ProgressCallback
from aniso.registry import SELECTION_RULES

if TYPE_CHECKING:
    from aniso.json_value import JsonObject
    from aniso.learn.selection import BlockGradient, ScoredAdapters, ScoreFiles
    from aniso.vectors import AdapterStores, BlockSource, Catalogue

_SHOWN = 5


@dataclass(frozen=True)
class Order:
    """What is to be chosen, and where it is written."""

    strategy: str
    budget: str | None
    seed: int
    workers: int
    leave_out: tuple[str, ...]
    out: Path | None
    storage: str | None
    overwrite: bool


@dataclass(frozen=True)
class Options:
    """The options for many adapters."""

    addresses: tuple[str, ...]
    catalogue: Path | None
    refresh: bool
    scores: Path | None
    shard: Shard | None
    merge: bool
    connections: int

    @property
    def applies(self) -> bool:
        """True unless there is a bank, or one directory that is opened as a whole."""
        remote = any(map(is_remote, self.addresses))
        return remote or len(self.addresses) > 1 or self.catalogue is not None or self.scores is not None

    def check(self, *, local_options: object) -> None:
        """Raise for options that do not fit together, before anything is loaded."""
        mistakes = {
            "--catalogue and --scores need --from": self.applies and not self.addresses,
            "--no-refresh needs --catalogue": not self.refresh and self.catalogue is None,
            "--shard and --merge need --scores": (self.shard or self.merge) and self.scores is None,
            "--shard writes scores, --merge reads them": self.shard and self.merge,
            "--gradients and --skip-unfit are for banks and single directories": self.applies
            and local_options,
        }
        for message, wrong in mistakes.items():
            if wrong:
                raise UsageError("USAGE", message, fix="aniso select --help")
        if self.applies:
            for address in self.addresses:
                require_address(address)
            if not self.refresh:
                checks.existing_file(self.catalogue)

    def check_rule(self, strategy: str, *, has_task: bool) -> None:
        """Raise for a rule that needs a bank, and for one without a task."""
        if not self.applies:
            return
        rule = SELECTION_RULES.get(strategy)
        if not rule.needs_gradient or rule.compares_vectors:
            raise UsageError(
                "USAGE",
                f"selection rule '{printable(strategy)}' needs a bank",
                fix="--strategy gradient or blockwise-gradient, or aniso bank build first",
            )
        if not has_task and not (self.scores is not None and self._files(self.scores).has_gradient):
            raise UsageError(
                "USAGE",
                f"selection rule '{printable(strategy)}' needs a task to select vectors for",
                fix="--task TASK, --texts FILE for a language model, or --scores with a gradient in it",
            )

    @staticmethod
    def _files(directory: Path) -> ScoreFiles:
        from aniso.learn.selection import ScoreFiles

        return ScoreFiles(directory)

    def run(self, load: Callable[[bool], Inputs], order: Order, json: bool) -> None:
        """Score, choose and print; with a shard only score."""
        from aniso.learn.selection import AdapterScoring, BlockGradient
        from aniso.vectors import AdapterStores, BlockSource

        files = None if self.scores is None else self._files(self.scores)
        saved = BlockGradient.load(files.gradient_path) if files is not None and files.has_gradient else None
        stores = AdapterStores(self.addresses, connections=self.connections)
        inputs = load(saved is not None and saved.of_texts)
        base = BlockSource.of(inputs.model.weight_source())
        with show.item_progress() as progress:
            catalogue = self._catalogue(base, stores, progress)
            gradient = _gradient(inputs, base, files, order, progress)
            scoring = AdapterScoring(base, catalogue, gradient, stores=stores, files=files, progress=progress)
            found = scoring.merged() if self.merge else scoring.run(self.shard)
        if self.catalogue is not None and self.shard is None and found.catalogue != catalogue:
            found.catalogue.save(self.catalogue)
        if self.shard is None:
            self._choose(found, gradient, base, stores, order, json)
        else:
            _print_shard(found, self.shard, stores, json)

    def _catalogue(self, base: BlockSource, stores: AdapterStores, progress: ProgressCallback) -> Catalogue:
        from aniso.vectors import Catalogue, refresh_catalogue

        exists = self.catalogue is not None and self.catalogue.exists()
        known = Catalogue.load(self.catalogue) if self.catalogue is not None and exists else None
        if known is not None and not self.refresh:
            return known.below([root_of(address) for address in self.addresses]).compared_with(base)
        found = refresh_catalogue(base, stores, known, progress=progress)
        if self.catalogue is not None and found != known:
            found.save(self.catalogue)
        return found

    def _choose(
        self,
        found: ScoredAdapters,
        gradient: BlockGradient,
        base: BlockSource,
        stores: AdapterStores,
        order: Order,
        json: bool,
    ) -> None:
        from aniso.experiments.problem import other_vectors

        assert order.budget is not None
        names = [row.name for row in found.catalogue.usable]
        others = set(other_vectors(names, gradient.own, order.leave_out))
        whole = SELECTION_RULES.get(order.strategy).whole
        chosen = found.choose(
            order.budget, whole=whole, leave_out=[name for name in names if name not in others]
        )
        if order.out is not None:
            bank = found.bank(chosen)
            total = sum(4 * block.numel for name in bank for block in bank[name].blocks)
            with show.progress("writing", total) as advance:
                bank.save(
                    order.out, storage=order.storage or "fp32", overwrite=order.overwrite, progress=advance
                )
        reasons = _reasons(found)
        show.notes(f"left out: {uri}: {reason}" for uri, reason in list(reasons.items())[:_SHOWN])
        if len(reasons) > _SHOWN:
            show.notes([f"left out: {len(reasons) - _SHOWN} more; see the catalogue, or --json"])
        more: JsonObject = {"adapters": len(found.catalogue.rows), "left_out": reasons, "read": _read(stores)}
        print_choice(chosen, len(base.layout.blocks), len(others), order.out, json, more)


def _gradient(
    inputs: Inputs, base: BlockSource, files: ScoreFiles | None, order: Order, progress: ProgressCallback
) -> BlockGradient:
    from aniso.learn.selection import BlockGradient

    model, objective, own = inputs
    if objective is None:
        assert files is not None  # checked, as no task was given
        return files.gradient(None, lambda: BlockGradient.load(files.gradient_path))

    def compute() -> BlockGradient:
        return BlockGradient.of(
            model, objective, base, own=own, seed=order.seed, workers=order.workers, progress=progress
        )

    if files is None:
        return compute()
    return files.gradient(BlockGradient.identity_of(model, objective, base, own, order.seed), compute)


def _reasons(found: ScoredAdapters) -> dict[str, str]:
    """Reasons by address of all adapters that were left out."""
    scored = {one.uri: one.reason for one in found.results if one.code}
    return {row.uri: row.reason for row in found.catalogue.rows if row.code} | scored


def _read(stores: AdapterStores) -> dict[str, int]:
    traffic = stores.traffic
    return {"requests": traffic.requests, "failures": traffic.failures, "bytes": traffic.nbytes}


def _print_shard(found: ScoredAdapters, shard: Shard, stores: AdapterStores, json: bool) -> None:
    own = [row for row in found.catalogue.rows if shard.has_name(row.uri)]
    reasons = {row.uri: row.reason for row in own if row.code}
    reasons |= {one.uri: one.reason for one in found.results if one.code and shard.has_name(one.uri)}
    scored = len(own) - len(reasons)
    if json:
        show.as_json({"shard": f"{shard.number}/{shard.count}", "scored": scored, "left_out": reasons,
                      "read": _read(stores)})  # fmt: skip
        return
    show.line(f"shard {shard.number}/{shard.count}: {scored} adapters scored, {len(reasons)} left out")
