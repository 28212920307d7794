"""What a bank needs of a selection rule, so that this package does not import the rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from aniso.vectors.bank import Bank


class Selection(Protocol):
    """The result of a selection rule, with the smaller bank."""

    @property
    def bank(self) -> Bank: ...


class SelectionRule(Protocol):
    """A rule of ``aniso.selection``."""

    def choose(self, bank: Bank) -> Selection: ...
