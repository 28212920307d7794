"""Selection among many adapters: each is read once, by ranges, scored and forgotten."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar, final

import numpy as np

from aniso.addresses import Shard
from aniso.errors import AnisoError, InputError, NumericalError, printable
from aniso.learn.selection.block_gradient import BlockGradient
from aniso.learn.selection.cell_table import CellTable
from aniso.learn.selection.score_files import AdapterScores, ScoreFiles, unreached
from aniso.learn.selection.selection_rule import ChosenCells, Scores
from aniso.progress import ProgressCallback
from aniso.sizes import Budget
from aniso.vectors import Bank, BlockSource, KeyEdits, TaskVector
from aniso.vectors.adapter import adapter_cells, block_tensors
from aniso.vectors.catalogue import Catalogue, CatalogueRow
from aniso.vectors.catalogue_refresh import AdapterStores
from aniso.vectors.difference import difference_between
from aniso.weights import PeftAdapter

PART = 256
"""Adapters in a file of scores."""
_SHOWN = 5
T = TypeVar("T")
R = TypeVar("R")


@final
class AdapterScoring:
    """Scores of the adapters in a catalogue along one gradient, ⟨G, BA⟩ = Σ (BᵀG) ∘ A, block by block."""

    def __init__(
        self,
        base: BlockSource,
        catalogue: Catalogue,
        gradient: BlockGradient,
        *,
        stores: AdapterStores | None = None,
        files: ScoreFiles | None = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        """``stores`` are those that the catalogue was made of; ``files`` keeps scores on disk."""
        gradient.require_base(base)
        self._base = base
        self._catalogue = catalogue
        self._gradient = gradient
        self._stores = stores or AdapterStores(sorted({row.root for row in catalogue.rows}))
        self._files = files
        self._progress = progress

    def run(self, shard: Shard | None = None) -> ScoredAdapters:
        """Score the adapters of a shard, or all, that have no scores yet; returns all scores that there are.

        Which shard an adapter belongs to depends on its address alone.
        """
        known = self._files.read(self._gradient) if self._files is not None else {}
        rows = [row for row in self._catalogue.usable if shard is None or shard.has_name(row.uri)]
        known = {key: one for key, one in known.items() if not unreached(one)}
        wanted = [row for row in rows if (row.uri, row.etag) not in known]
        waiting: list[AdapterScores] = []
        with contextlib.closing(self._scored(wanted)) as results:
            try:
                for i, one in enumerate(results, 1):
                    known[one.uri, one.etag] = one
                    waiting.append(one)
                    if len(waiting) == PART:
                        self._keep(waiting)
                    if self._progress:
                        self._progress("scoring adapters", i, len(wanted))
            finally:
                self._keep(waiting)
        return ScoredAdapters(self._base, self._catalogue, self._stores, known)

    def merged(self) -> ScoredAdapters:
        """Return the scores that all workers have written; raises if an adapter has none."""
        known = self._files.read(self._gradient) if self._files is not None else {}
        missing = [row.uri for row in self._catalogue.usable if (row.uri, row.etag) not in known]
        if missing:
            raise InputError(
                "SCORES",
                f"{len(missing)} of {len(self._catalogue.usable)} adapters have no scores yet",
                found=[printable(uri) for uri in missing[:_SHOWN]],
                more=f"{len(missing) - _SHOWN} more" if len(missing) > _SHOWN else "",
                fix="run the shards that are missing, or all with: --shard 1/1",
            )
        return ScoredAdapters(self._base, self._catalogue, self._stores, known)

    def _keep(self, results: list[AdapterScores]) -> None:
        if self._files is not None and results:
            self._files.add(results, self._gradient)
        results.clear()

    def _scored(self, rows: Sequence[CatalogueRow]) -> Generator[AdapterScores]:
        """Read some adapters at once, and score them one after another, in order."""
        for row, adapter in ahead(self._fetched, rows, self._stores.connections):
            result = AdapterScores(row.uri, row.etag)
            yield result.refused(adapter) if isinstance(adapter, AnisoError) else self._score(result, adapter)

    def _fetched(self, row: CatalogueRow) -> PeftAdapter | AnisoError:
        try:
            adapter = self._stores.adapter(row)
            adapter.prefetch(adapter.tensors)
            return adapter
        except AnisoError as e:
            return e

    def _score(self, result: AdapterScores, adapter: PeftAdapter) -> AdapterScores:
        try:
            cells, _ = adapter_cells(self._base, adapter)
            values = []
            for name, read in cells.items():
                delta = read()
                values.append((delta.along(self._gradient.blocks[name]), delta.norm(), delta.nbytes))
            scores, norms, sizes = (np.array(own) for own in zip(*values, strict=True))
            if not (np.isfinite(scores).all() and np.isfinite(norms).all()):
                raise NumericalError(
                    "VECTOR-RANGE", f"the update of '{adapter.label}' is too large", fix="leave it out"
                )
            return replace(
                result, blocks=tuple(cells), scores=scores, norms=norms, nbytes=sizes.astype(np.int64)
            )
        except AnisoError as e:
            return result.refused(e)


def ahead(work: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[tuple[T, R]]:
    """Yield items with the results of work, in order; a few are worked on ahead, no more than fit memory."""
    with ThreadPoolExecutor(threads) as pool:
        started: deque[tuple[T, Future[R]]] = deque()
        try:
            for item in items:
                started.append((item, pool.submit(work, item)))
                if len(started) > threads:
                    first, future = started.popleft()
                    yield first, future.result()
            while started:
                first, future = started.popleft()
                yield first, future.result()
        finally:
            for _, future in started:
                future.cancel()


@final
class ScoredAdapters:
    """The adapters of a catalogue with their scores."""

    def __init__(
        self,
        base: BlockSource,
        catalogue: Catalogue,
        stores: AdapterStores,
        scores: Mapping[tuple[str, str], AdapterScores],
    ) -> None:
        self._base = base
        self._stores = stores
        self._known = scores
        self.catalogue = catalogue.updated(self._updated(row) for row in catalogue.usable)
        """The catalogue with the norms of adapters that were read, and reasons for those that are damaged."""

    def _updated(self, row: CatalogueRow) -> CatalogueRow:
        one = self._known.get((row.uri, row.etag))
        if one is None:
            return row
        if unreached(one):  # which says nothing about the adapter itself
            return row
        return replace(row, norm=one.norm, code=one.code, reason=one.reason)

    @property
    def results(self) -> tuple[AdapterScores, ...]:
        """Results of the catalogue's adapters, in its order."""
        keys = ((row.uri, row.etag) for row in self.catalogue.rows)
        return tuple(self._known[key] for key in keys if key in self._known)

    def choose(
        self, budget: int | str | Budget, *, whole: bool = False, leave_out: Sequence[str] = ()
    ) -> ScoredChoice:
        """Choose cells of all adapters within the budget, or ``whole`` adapters; see ``SelectionRule``."""
        limit = Budget.of(budget)
        rows = {row.uri: row for row in self.catalogue.usable if row.name not in leave_out}
        own = [one for one in self.results if not one.code and one.uri in rows]
        names = [rows[one.uri].name for one in own]
        order = {block.name: i for i, block in enumerate(self._base.layout.blocks)}
        # in the order of a bank's blocks, so that sums are the same to the last digit
        places = [np.argsort([order[block] for block in one.blocks], kind="stable") for one in own]
        cells = [(name, one.blocks[i]) for name, one, at in zip(names, own, places, strict=True) for i in at]
        if not cells:
            raise self._nothing_left()
        scores = np.concatenate([np.asarray(one.scores)[at] for one, at in zip(own, places, strict=True)])
        sizes = np.concatenate([np.asarray(one.nbytes)[at] for one, at in zip(own, places, strict=True)])
        kept = CellTable.of(cells, scores).kept(limit, lambda i: int(sizes[i]), whole=whole)
        if not kept:
            raise InputError("USAGE", f"no vector fits into a budget of {limit}", fix="use a larger --budget")
        wanted = {(name, block) for name, blocks in kept.items() for block in blocks}
        return ScoredChoice(
            {name: tuple(blocks) for name, blocks in kept.items()},
            sum(int(size) for cell, size in zip(cells, sizes, strict=True) if cell in wanted),
            "gradient" if whole else "blockwise-gradient",
            limit,
            _scores_of(kept, cells, scores.tolist()),
            _notes(limit, len(own)),
        )

    def bank(self, choice: ScoredChoice) -> Bank:
        """Return a bank of the chosen cells; their tensors, and no others, are read now into memory."""
        rows = {row.name: row for row in self.catalogue.rows}
        chosen = [rows[name] for name in choice.cells]

        def fetched(row: CatalogueRow) -> PeftAdapter:
            adapter = self._stores.adapter(row)
            needed = block_tensors(self._base, adapter)
            adapter.prefetch([key for block in choice.cells[row.name] for key in needed[block]])
            return adapter

        vectors = {}
        for row, adapter in ahead(fetched, chosen, self._stores.connections):
            made = difference_between(self._base, adapter, KeyEdits(), name=row.name, hashed=False)
            note = f"read by ranges, and not hashed as a whole: ETag {printable(row.etag, 100)}"
            origin = replace(made.provenance, notes=(*made.provenance.notes, note))
            vector = TaskVector.of_difference(replace(made, provenance=origin))
            vectors[row.name] = vector.within(choice.cells[row.name])
        return Bank(vectors)

    def _nothing_left(self) -> InputError:
        reasons = [f"{row.uri}: {row.reason}" for row in self.catalogue.rows if row.reason]
        return InputError(
            "FILE-MISSING",
            "there is no adapter that fits the base",
            found=[printable(text) for text in reasons[:_SHOWN]] or "no adapter at all",
            fix="check the address and the --model",
        )


@final
@dataclass(frozen=True)
class ScoredChoice(ChosenCells):
    """Result of a selection by scores; ``ScoredAdapters.bank`` reads it."""

    kept: Mapping[str, tuple[str, ...]]
    total: int
    rule: str
    budget: Budget
    scores: Scores
    """Scores of all cells of the chosen vectors."""
    notes: tuple[str, ...] = ()

    @property
    def cells(self) -> Mapping[str, tuple[str, ...]]:
        return self.kept

    @property
    def nbytes(self) -> int:
        return self.total


def _scores_of(
    kept: Mapping[str, object], cells: Sequence[tuple[str, str]], scores: Sequence[float]
) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {name: {} for name in kept}
    for (name, block), score in zip(cells, scores, strict=True):
        if name in found:
            found[name][block] = score
    return found


def _notes(budget: Budget, among: int) -> tuple[str, ...]:
    if budget.count is None or budget.count <= among:
        return ()
    return (f"a budget of {budget} is more than the {among} adapters: all are kept",)
