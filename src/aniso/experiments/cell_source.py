"""What hands out the cells that are to be run: a list, or claims shared with other workers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol, Self, final

from aniso.experiments.claims import Claims
from aniso.experiments.grid import Grid, Status
from aniso.experiments.spec import Cell

_LOOK = 2.0  # seconds between looks at the claims of others


class CellSource(Protocol):
    """Hands out cells; a context that covers the whole run."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...

    @property
    def left(self) -> bool:
        """True while there can be further cells."""

    def take(self) -> Cell | None:
        """Return the next cell; None if there is none at present."""

    def ended(self, cell: Cell) -> None:
        """Hear that a cell has ended, whatever became of it."""

    def lost(self, cell: Cell) -> bool:
        """Tell whether somebody else runs this cell now."""


@final
class ListedCells:
    """All cells of a list, in order."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._left = list(cells)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def left(self) -> bool:
        return bool(self._left)

    def take(self) -> Cell | None:
        return self._left.pop(0) if self._left else None

    def ended(self, cell: Cell) -> None:
        pass

    def lost(self, cell: Cell) -> bool:
        return False


@final
class ClaimedCells:
    """Cells that no other worker has claimed, until each has been run by somebody.

    ``waiting`` is called with the number of cells that others run, when there is nothing else to do.
    """

    def __init__(
        self,
        grid: Grid,
        cells: Sequence[Cell],
        claims: Claims,
        *,
        retry_failed: bool = False,
        waiting: Callable[[int], None] | None = None,
    ) -> None:
        self._grid = grid
        self._claims = claims
        self._done: set[Status] = {"recorded"} if retry_failed else {"recorded", "failed"}
        self._left = list(cells)
        random.Random(claims.worker).shuffle(self._left)  # workers that start together try different cells
        self._waiting = waiting or (lambda count: None)
        self._waited_for = 0
        self._next_look = 0.0

    def __enter__(self) -> Self:
        self._claims.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._claims.__exit__()

    @property
    def left(self) -> bool:
        return bool(self._left)

    def take(self) -> Cell | None:
        if time.monotonic() < self._next_look:
            return None
        for cell in list(self._left):
            if self._was_done(cell):
                continue
            if self._claims.take(cell.setting.id):
                if self._was_done(cell):  # recorded between the look and the claim
                    self.ended(cell)
                    continue
                self._left.remove(cell)
                return cell
        self._next_look = time.monotonic() + _LOOK
        if len(self._left) not in (0, self._waited_for):
            self._waited_for = len(self._left)
            self._waiting(self._waited_for)
        return None

    def _was_done(self, cell: Cell) -> bool:
        if self._grid.status(cell) not in self._done:
            return False
        self._left.remove(cell)
        return True

    def ended(self, cell: Cell) -> None:
        self._claims.release(cell.setting.id)

    def lost(self, cell: Cell) -> bool:
        return cell.setting.id in self._claims.lost
