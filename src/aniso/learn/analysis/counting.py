"""Progress over the images of several evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from aniso.progress import ProgressCallback, progress_or_default


@final
class ImageCounter:
    """Reports the images of all evaluations so far, where each evaluation counts its own from zero."""

    def __init__(self, what: str, total: int, progress: ProgressCallback | None) -> None:
        self._what, self._total = what, total
        self._progress = progress_or_default(progress)
        self._done = 0

    @contextmanager
    def counting(self, images: int) -> Iterator[ProgressCallback]:
        """Yield the callback of one evaluation of so many images."""
        yield lambda what, done, total: self._progress(self._what, self._done + done, self._total)
        self._done += images
