"""Checksums of the parts of a vector file: written with it, compared the first time a part is read.

A part is what one vector has in one tensor: a row of a stacked tensor, the ranks of one low-rank term, or a
whole tensor that vectors share. The index of the file lists the checksums of all parts, and its own sha256 is
in the file's metadata and in the bank's manifest: no damaged or exchanged part is used.

xxh3 runs at the speed of memory (30 GB/s on one core, where sha256 has 1.8 and crc32 4.2): checking costs
less than reading. It detects damage; it does not protect against an attacker who can write the bank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import final

import xxhash
from torch import Tensor

from aniso.errors import InputError, printable
from aniso.weights import SafetensorsFile, SafetensorsWriter
from aniso.weights.dtypes import as_bytes
from aniso.weights.files import ByteFile

DIGITS = 16
"""Hexadecimal digits of one checksum."""


@final
class PartWriter:
    """Writes tensors part by part and keeps the checksum of every part."""

    def __init__(self, writer: SafetensorsWriter) -> None:
        self._writer = writer
        self._digest = xxhash.xxh3_64()
        self._open = ""
        self.checksums: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor that is one part."""
        self._writer.add(name, tensor)
        self.checksums[name] = xxhash.xxh3_64_hexdigest(as_bytes(tensor.detach().contiguous()))

    def begin(self, name: str, dtype: str) -> None:
        """Start a tensor whose parts follow."""
        self._writer.begin(name, dtype)
        self._open = name
        self.checksums[name] = ""

    def append(self, piece: Tensor) -> None:
        """Write a piece of the current part."""
        self._writer.append(piece)
        self._digest.update(as_bytes(piece.detach().contiguous()))

    def end_part(self) -> None:
        """Record the checksum of what was appended since the last part ended."""
        self.checksums[self._open] += self._digest.hexdigest()
        self._digest.reset()

    def end(self, shape: tuple[int, ...]) -> None:
        """Finish the tensor; its last part must have ended."""
        self._writer.end(shape)


@final
class VerifiedFile:
    """Reads the tensors of a vector file and compares every part once with its checksum.

    Files of the first schema list no checksums; there the bank's manifest has the sha256 of the whole file,
    which is compared before the first tensor is returned.
    """

    def __init__(
        self,
        file: SafetensorsFile,
        checksums: Mapping[str, str],
        starts: Callable[[str], Sequence[int]],
        sha256: str | None,
    ) -> None:
        """``starts`` gives the first row of every part of a tensor."""
        self._file = file
        self._checksums = checksums
        self._starts = starts
        self._sha256 = None if checksums else sha256
        self._verified: set[tuple[str, int]] = set()
        self._ranges: set[tuple[str, int, int]] = set()  # ranges that are read repeatedly

    def read(self, name: str) -> Tensor:
        """Read a tensor that is one part."""
        self._verify_file()
        tensor = self._file.read(name)
        self._verify(name, 0, tensor)
        return tensor

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows ``start:stop``, which must begin and end where parts do."""
        self._verify_file()
        tensor = self._file.read_rows(name, start, stop)
        if self._checksums and (name, start, stop) not in self._ranges:
            self._verify_rows(name, start, stop, tensor)
            self._ranges.add((name, start, stop))
        return tensor

    def _verify_rows(self, name: str, start: int, stop: int, tensor: Tensor) -> None:
        starts = self._starts(name)
        for part in range(bisect_left(starts, start), bisect_left(starts, stop)):
            end = starts[part + 1] if part + 1 < len(starts) else stop
            self._verify(name, part, tensor[starts[part] - start : end - start])

    def _verify(self, name: str, part: int, tensor: Tensor) -> None:
        if not self._checksums or (name, part) in self._verified:
            return
        expected = self._checksums[name][part * DIGITS : (part + 1) * DIGITS]
        found = xxhash.xxh3_64_hexdigest(as_bytes(tensor))
        if found != expected:
            block = printable(name.partition("|")[0])
            raise InputError(
                "FILE-HASH",
                f"'{self._file.label}' is damaged: block '{block}' does not match its checksum",
                key=name,
                part=part,
                expected=expected,
                found=found,
                fix="restore the file from a copy, or build it again",
            )
        self._verified.add((name, part))

    def _verify_file(self) -> None:
        if self._sha256 is None:
            return
        require_sha256(self._file.files[0], self._sha256)
        self._sha256 = None


def require_sha256(file: ByteFile, expected: str, progress: Callable[[int], None] | None = None) -> None:
    """Raise FILE-HASH unless the whole file has this sha256."""
    found = file.sha256(progress)
    if found != expected:
        raise InputError(
            "FILE-HASH",
            f"'{file.label}': content hash differs from the recorded one",
            expected=expected,
            found=found,
            fix="restore the file from a copy, or build the bank again",
        )
