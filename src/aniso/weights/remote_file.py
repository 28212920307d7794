"""A remote file read by ranges: what is read ahead stays in memory, anything else is one request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import final

from aniso.errors import InputError, printable
from aniso.weights.files import ByteFile

_GAP = 64 << 10  # bytes between two ranges that cost less than another request
_LONGEST = 32 << 20  # bytes of one request


@final
class RemoteFile(ByteFile):
    """Bytes of an object in a store; ``read_range`` requests those from start to stop."""

    piece = 8 << 20

    def __init__(
        self, uri: str, size: int, read_range: Callable[[int, int], bytes], known: bytes = b""
    ) -> None:
        """``known`` are the first bytes."""
        self.label = printable(uri)
        self.name = uri.rpartition("/")[2]
        self.size = size
        self._read_range = read_range
        self._kept: list[tuple[int, bytes]] = [(0, known)] if known else []

    def read_into(self, buffer: memoryview, offset: int) -> None:
        stop = offset + len(buffer)
        if stop > self.size:
            raise InputError(
                "FILE-TRUNCATED",
                f"'{self.label}' ends after {self.size} bytes",
                expected=f"{stop} bytes",
                fix="upload it again",
            )
        for start, data in self._kept:
            if start <= offset and stop <= start + len(data):
                buffer[:] = memoryview(data)[offset - start : stop - start]
                return
        for start in range(offset, stop, _LONGEST):
            end = min(start + _LONGEST, stop)
            buffer[start - offset : end - offset] = self._read_range(start, end)

    def fetch(self, spans: Sequence[tuple[int, int]]) -> None:
        for start, stop in joined(span for span in spans if span[0] < span[1] and not self._has(*span)):
            self._kept.append((start, self._read_range(start, stop)))

    def _has(self, start: int, stop: int) -> bool:
        return any(first <= start and stop <= first + len(data) for first, data in self._kept)


def joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges with near neighbours as one, up to the longest request; longer ones stay as they are."""
    out: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if out and start - out[-1][1] <= _GAP and max(stop, out[-1][1]) - out[-1][0] <= _LONGEST:
            out[-1] = (out[-1][0], max(stop, out[-1][1]))
        else:
            out.append((start, stop))
    return out
