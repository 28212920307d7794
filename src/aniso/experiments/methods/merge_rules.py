"""Merge rules as methods: one merged vector, added to the base at one scale."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, final

from aniso.experiments.merging import MERGE_OPTION_HELP, merge_rule, merge_settings
from aniso.experiments.methods.method import Method
from aniso.experiments.options import option
from aniso.json_value import JsonObject
from aniso.registry import METHODS

if TYPE_CHECKING:
    from aniso.compose import Composition
    from aniso.experiments.result import MethodPlan, MethodResult
    from aniso.experiments.session import Session
    from aniso.experiments.settings.setting import Setting
    from aniso.merge import MergeOptions, MergeRule
    from aniso.records import Metrics
    from aniso.vectors import Bank

_POINTS = tuple(i / 10 for i in range(31))
"""Scales that are tried: 0 to 3 in steps of 0.1, as the papers of Iso and TSV-M do."""
_SUM_POINTS = tuple(i / 20 for i in range(21))
"""Scales of a sum of vectors: 0 to 1 in steps of 0.05, as for task arithmetic."""


class MergeMethod(Method, ABC):
    """Methods that add one merged vector to the base; the only number to choose is its scale."""

    scale: float | None = option(
        None,
        help="Scale of the merged vector, which then needs no data; default: searched on validation data, "
        "except for mean, which is 1.",
        group="Method",
    )
    merge_options: tuple[str, ...] = option(
        (), help=MERGE_OPTION_HELP, group="Method", flags=("--merge-option",), strict=False
    )

    column = "merged"
    needs_bank = True
    chooses = True
    points: ClassVar[Sequence[float]] = _POINTS
    default_scale: ClassVar[float | None] = None
    """The scale if none is given; None if it is searched."""

    @property
    def composes(self) -> bool:
        return True

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if any(pair.partition("=")[0] == "scale" for pair in self.merge_options):
            raise ValueError("the scale is an option of its own: scale, not merge_options")
        if self.merge_options:
            merge_rule(self.name, self.merge_options)

    def spec(self, setting: Setting) -> JsonObject:
        pairs = merge_settings(self.name, self.merge_options)
        own = [pair for pair in pairs if pair.partition("=")[0] != "scale"]
        return {**super().spec(setting), "scale": self.fixed_scale, "merge_options": [*own]}

    @property
    def fixed_scale(self) -> float | None:
        """The scale that was given, or that the method has; None if it is searched."""
        return self.default_scale if self.scale is None else self.scale

    @property
    def uses_keep_data(self) -> bool:
        return self.fixed_scale is None

    def _rule(self) -> tuple[MergeRule, MergeOptions]:
        return merge_rule(self.name, (*self.merge_options, "scale=1"))

    def plan(self, session: Session) -> MethodPlan:
        from aniso.compose import Partition
        from aniso.experiments.merging import planned_vector
        from aniso.experiments.result import MethodPlan

        rule, how = self._rule()
        bank = session.bank
        if rule.coefficient(len(bank)) is None:
            bank = bank.with_vectors({self.name: planned_vector(bank, rule, how)}).only(self.name)
        return MethodPlan.of_composition(session, session.compose(bank, Partition.whole()))

    def composition(self, session: Session) -> tuple[Composition, float]:
        """Merge; return the composition of the merged vector, and the coefficient that is scale 1."""
        from aniso.compose import Partition

        unit = self._rule()[0].coefficient(len(session.bank)) or 1.0
        return session.compose(session.composed_bank, Partition.whole()), unit

    def run(self, session: Session) -> MethodResult:
        from aniso.experiments.result import MethodResult
        from aniso.records import Metrics

        composition, unit = self.composition(session)
        scale = self.fixed_scale
        if scale is None:
            metrics = self._searched(session, composition, unit)
        else:
            composition.values.data.fill_(unit * scale)
            metrics = Metrics(scale=scale)
        return MethodResult(lambda task: composition, metrics, composition.coefficients)

    def _searched(self, session: Session, composition: Composition, unit: float) -> Metrics:
        """Leave the composition at the best scale; ``unit`` is the coefficient of scale 1."""
        from aniso.learn import search
        from aniso.records import Metrics

        options = session.options
        found = search(
            composition,
            session.keep,
            [unit * point for point in self.points],
            workers=options.workers,
            progress=options.progress,
        )
        rows = zip(found.history, self.points, strict=False)  # a keep rule may end the search early
        history = tuple(row.model_copy(update={"scale": point}) for row, point in rows)
        return Metrics(scale=self.points[found.kept], history=history)

    def composed_bank(self, session: Session) -> Bank:
        from aniso.experiments.merging import merged_vector

        rule, how = self._rule()
        bank, options = session.bank, session.options
        if rule.coefficient(len(bank)) is not None:
            return bank
        bank.require_new([self.name])
        vector = merged_vector(bank, rule, how, options.directory, options.progress)
        return bank.with_vectors({self.name: vector}).only(self.name)

    def outputs(self) -> tuple[str, ...]:
        from aniso.experiments.run_files import COEFFICIENTS, MERGED

        is_sum = self._rule()[0].coefficient(1) is not None
        return (COEFFICIENTS,) if is_sum else (COEFFICIENTS, MERGED)


@final
@METHODS.register("mean")
class MeanMerge(MergeMethod):
    """Average the vectors, without data."""

    default_scale: ClassVar[float | None] = 1.0


@final
@METHODS.register("task-arithmetic")
class TaskArithmeticMerge(MergeMethod):
    """Add the vectors at one scale (task arithmetic)."""

    points: ClassVar[Sequence[float]] = _SUM_POINTS


@final
@METHODS.register("ties")
class TiesMerge(MergeMethod):
    """Merge the vectors by TIES, at one scale."""


@final
@METHODS.register("dare")
class DareMerge(MergeMethod):
    """Merge the vectors by DARE, at one scale."""


@final
@METHODS.register("tsv")
class TSVMerge(MergeMethod):
    """Merge the vectors by TSV-M, at one scale."""


@final
@METHODS.register("iso-c")
class IsoCMerge(MergeMethod):
    """Merge the vectors by Iso-C, at one scale."""


@final
@METHODS.register("iso-cts")
class IsoCTSMerge(MergeMethod):
    """Merge the vectors by Iso-CTS, at one scale."""


@final
@METHODS.register("cart")
class CartMerge(MergeMethod):
    """Merge the vectors by CART, at one scale."""


@final
@METHODS.register("aswudi")
class AswudiMerge(MergeMethod):
    """Merge the vectors by ASWUDI, at one scale."""


@final
@METHODS.register("swudi")
class SwudiMerge(MergeMethod):
    """Merge the vectors by SWUDI, at one scale."""
