"""What methods that learn coefficients share: which coefficients there are."""

from __future__ import annotations

from abc import ABC
from dataclasses import replace
from typing import TYPE_CHECKING

from aniso.errors import UsageError, printable
from aniso.experiments.methods.method import Method
from aniso.experiments.options import option
from aniso.registry import PARTITIONS

if TYPE_CHECKING:
    from aniso.compose import Composition, Partition
    from aniso.experiments.session import Session
    from aniso.experiments.settings.setting import Setting


class ComposingMethod(Method, ABC):
    """Methods that learn the coefficients of a composition."""

    partition: str = option(
        "blocks",
        help="Which coefficients there are: blocks (one per vector and block), whole, rows, columns, "
        "random:K; blocks@weight for matrices only.",
        group="Method",
    )

    column = "learned"
    needs_bank = True
    minimises = True
    chooses = True

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

    def resolved_partition(self, seed: int) -> Partition:
        """Return the partition; random parts are drawn by the run's seed."""
        from aniso.compose import Partition

        found = Partition.parse(self.partition)
        return replace(found, seed=seed) if found.rule == "random" else found

    def composition(self, session: Session) -> Composition:
        """Return the composition whose coefficients are learned."""
        return session.compose(session.bank, self.resolved_partition(session.setting.seed))
