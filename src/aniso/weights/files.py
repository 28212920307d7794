"""Regular files read by position, never memory-mapped: a file cut short elsewhere cannot kill us."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, final

import torch
from torch import Tensor

from aniso.errors import InputError, UnsafeError, printable
from aniso.weights.dtypes import as_bytes

Progress = Callable[[int], None]
"""Called with the number of bytes just done."""
Told = Callable[[str, int, int], None]
"""Called with what is being done, how far it is, and how far it goes."""

CHUNK = 1 << 20
_ALIGNMENT = 64  # bytes, as torch has it for memory of its own
_reading = threading.local()


@final
class ReadBuffer:
    """Memory for tensors that are read again and again; it grows to what was asked for last time."""

    def __init__(self) -> None:
        self._bytes = _fresh(0)
        self._used = 0

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """What this thread reads inside lies in the buffer, and is valid until it is used again."""
        if self._used > self._bytes.numel():
            self._bytes = _fresh(self._used)
        self._used = 0
        _reading.buffer = self
        try:
            yield
        finally:
            _reading.buffer = None

    def take(self, nbytes: int) -> Tensor:
        start, stop = self._used, self._used + nbytes
        self._used = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return self._bytes[start:stop] if stop <= self._bytes.numel() else _fresh(nbytes)


def _fresh(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


class RawFile:
    """An open regular file with bounded, checked reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.label = printable(path)
        try:
            # non-blocking, so that opening a FIFO returns and can be refused
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as e:
            code = "FILE-MISSING" if isinstance(e, FileNotFoundError) else "FILE-ACCESS"
            raise InputError(
                code,
                f"'{self.label}' cannot be opened",
                reason=e.strerror,
                fix=f"ls -l '{self.label}'",
            ) from None
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            self._fd = -1
            raise InputError(
                "FILE-KIND",
                f"'{self.label}' is not a regular file",
                fix="name a file or a directory",
            )
        self.size = status.st_size
        self._state = _state(status)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # when all ends, os may be gone first
        if getattr(self, "_fd", -1) >= 0:
            close(self._fd)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            n = os.preadv(self._fd, [buffer[done : done + (64 << 20)]], offset + done)
            if n == 0:
                raise InputError(
                    "FILE-CHANGED",
                    f"'{self.label}' became shorter while it was read",
                    expected=f"{self.size} bytes",
                    found=f"{os.fstat(self._fd).st_size} bytes",
                    fix="make sure nothing writes to the file, then try again",
                )
            done += n
        self._check_unchanged()

    def read(self, offset: int, size: int) -> bytes:
        data = bytearray(size)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def read_tensor(self, offset: int, nbytes: int) -> Tensor:
        """The bytes as a uint8 tensor, aligned for any dtype; fresh, unless a ``ReadBuffer`` is in use."""
        buffer: ReadBuffer | None = getattr(_reading, "buffer", None)
        out = buffer.take(nbytes) if buffer else _fresh(nbytes)
        if nbytes:
            self.read_into(as_bytes(out), offset)
        return out

    def head(self, size: int) -> bytes:
        return self.read(0, min(size, self.size))

    def stream(self) -> IO[bytes]:
        """The same open file as a stream, for readers that want one."""
        return os.fdopen(os.dup(self._fd), "rb")

    def sha256(self, progress: Progress | None = None) -> str:
        digest = hashlib.sha256()
        for part in self.pieces(0, self.size):
            digest.update(part)
            if progress:
                progress(len(part))
        return digest.hexdigest()

    def pieces(self, offset: int, size: int) -> Iterator[memoryview]:
        """The bytes of a range, a piece at a time, each valid until the next."""
        view = memoryview(bytearray(min(CHUNK, size)))
        for start in range(0, size, CHUNK):
            part = view[: min(CHUNK, size - start)]
            self.read_into(part, offset + start)
            yield part

    def _check_unchanged(self) -> None:
        if _state(os.fstat(self._fd)) != self._state:
            raise InputError(
                "FILE-CHANGED",
                f"'{self.label}' changed while it was read",
                fix="make sure nothing writes to the file, then try again",
            )


def _state(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def refuse_unknown(file: RawFile) -> InputError | UnsafeError:
    """The most helpful error for a file that is in no format we read."""
    head = file.head(512)
    text = head.lstrip().lower()
    if file.size < 8:
        what = "is empty" if file.size == 0 else f"is too short ({file.size} bytes)"
        return InputError("FILE-EMPTY", f"'{file.label}' {what}", fix="download it again")
    if text.startswith(b"version https://git-lfs"):
        return InputError("FILE-POINTER", f"'{file.label}' is a git-LFS pointer", fix="git lfs pull")
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return InputError("FILE-PAGE", f"'{file.label}' is an HTML page", fix="check the download address")
    if text.startswith((b"{", b"[")):
        return InputError(
            "FILE-PAGE",
            f"'{file.label}' is a JSON text, not weights",
            found=printable(head[:80].decode("utf-8", "replace")),
            fix="check the download address, or name the directory it lies in",
        )
    if head[:4] == b"PK\x07\x08":
        return UnsafeError(
            "ZIP-UNSAFE", f"'{file.label}' is a zip archive in several parts", fix="download it again"
        )
    return InputError(
        "FILE-FORMAT",
        f"'{file.label}' is in no format that aniso reads",
        found=_KINDS.get(head[:4], f"first bytes {head[:8].hex(' ')}"),
        expected="safetensors, or a checkpoint written by torch.save",
        fix="save the model's state_dict with safetensors",
    )


_KINDS = {
    b"GGUF": "a GGUF file (quantised for llama.cpp)",
    b"\x89HDF": "an HDF5 file (Keras)",
    b"\x1f\x8b\x08\x00": "a gzip archive: unpack it first",
    b"\x28\xb5\x2f\xfd": "a zstd archive: unpack it first",
    b"\x93NUM": "a NumPy array",
    b"PK\x05\x06": "an empty zip archive",
    b"PK\x07\x08": "a zip archive in several parts",
}
