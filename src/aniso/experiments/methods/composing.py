"""What methods that learn coefficients share: which coefficients there are."""

from __future__ import annotations

from abc import ABC
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator

from aniso.errors import UsageError, printable
from aniso.experiments.merging import MERGE_OPTION_HELP, merge_rule, merge_settings
from aniso.experiments.methods.method import Method
from aniso.experiments.options import option
from aniso.experiments.run_files import MERGED
from aniso.json_value import JsonObject, JsonValue
from aniso.registry import PARTITIONS
from aniso.start_text import parse_start

if TYPE_CHECKING:
    from aniso.compose import Composition, Partition
    from aniso.experiments.session import Session
    from aniso.experiments.settings.setting import Setting
    from aniso.learn import Objective, Start


def _number_as_text(value: object) -> object:
    """A number, as specs may have it, as text."""
    return repr(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


class ComposingMethod(Method, ABC):
    """Methods that learn the coefficients of a composition."""

    partition: str = option(
        "blocks",
        help="Which coefficients there are: blocks (one per vector and block), whole, rows, columns, "
        "random:K, components:K (one per singular component); blocks@weight for matrices only.",
        group="Method",
    )

    start: Annotated[str | None, BeforeValidator(_number_as_text)] = option(
        None,
        help="Coefficients to start at, in place of 0: a file or a run; a number; depth:A,B from A in the "
        "first layer to B in the last; least-squares; or a merge rule such as tsv.",
        group="Method",
        without=None,
    )
    start_scale: float = option(
        1.0, help="Factor of the coefficients to start at.", group="Method", without=1.0
    )
    merge_options: tuple[str, ...] = option(
        (),
        help=MERGE_OPTION_HELP,
        group="Method",
        flags=("--merge-option",),
        strict=False,
        without=[],
    )
    stay_near: float = option(
        0.0,
        help="Weight of the squared distance to the start in the objective.",
        group="Objective",
        ge=0,
        without=0.0,
    )

    column = "learned"
    needs_bank = True
    minimises = True
    chooses = True

    @property
    def composes(self) -> bool:
        return True

    def check(self, setting: Setting) -> None:
        super().check(setting)
        rule = self.partition.partition("@")[0].partition(":")[0]
        if rule not in PARTITIONS:
            raise UsageError(
                "PARTITION",
                f"'{printable(self.partition)}' is no partition",
                expected=f"{', '.join(PARTITIONS.names)}, with @weight for matrices only",
                fix="--partition blocks",
            )
        if self.start is None and (self.start_scale != 1 or self.merge_options):
            raise ValueError("start_scale and merge_options belong to a start: add start, or leave them out")
        text = None if self.start is None else parse_start(self.start)
        if self.merge_options and (text is None or text.rule is None):
            raise ValueError("merge_options are for a merge rule as start, such as tsv")
        if text is not None and text.rule is not None and self.merge_options:
            merge_rule(text.rule, self.merge_options)

    def spec(self, setting: Setting) -> JsonObject:
        return {**super().spec(setting), "merge_options": self._merge_settings()}

    def _merge_settings(self) -> list[JsonValue]:
        """All options of the merge rule that is started at."""
        text = None if self.start is None else parse_start(self.start)
        return [] if text is None or text.rule is None else [*merge_settings(text.rule, self.merge_options)]

    def input_files(self) -> dict[str, str]:
        file = None if self.start is None else parse_start(self.start).file
        return {} if file is None else {"start": str(file)}

    def start_of(self, session: Session) -> Start | None:
        from aniso.experiments.starting import starting_point

        return starting_point(session, self)

    def objective(self, session: Session) -> Objective:
        """Return the problem's objective, with the distance to the start if it has a weight."""
        found = super().objective(session)
        if not self.stay_near:
            return found
        from aniso.compose import Coefficients
        from aniso.learn import StayNear

        zero = Coefficients.zeros(session.bank, self.resolved_partition(session.setting.seed))
        near = zero if session.start is None else session.start.coefficients
        return found + self.stay_near * StayNear(near)

    def start_outputs(self) -> tuple[str, ...]:
        """Return the file of the merged vector, if learning starts at one."""
        text = None if self.start is None else parse_start(self.start)
        if text is None or text.rule is None:
            return ()
        is_sum = merge_rule(text.rule, self.merge_options)[0].coefficient(1) is not None
        return () if is_sum else (MERGED,)

    def resolved_partition(self, seed: int) -> Partition:
        """Return the partition; random parts are drawn by the run's seed."""
        from aniso.compose import Partition

        found = Partition.parse(self.partition)
        return replace(found, seed=seed) if found.rule == "random" else found

    def composition(self, session: Session) -> Composition:
        """Return the composition whose coefficients are learned, at zero."""
        return session.compose(session.composed_bank, self.resolved_partition(session.setting.seed))

    def planned_composition(self, session: Session) -> Composition:
        """Return that composition for plans, before vectors are merged."""
        from aniso.experiments.starting import planned_bank

        bank = planned_bank(session, self)
        return session.compose(bank, self.resolved_partition(session.setting.seed))
