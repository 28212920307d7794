"""Files read by position, never memory-mapped: a file that is truncated cannot crash the process."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, final

import torch
from torch import Tensor

from aniso.errors import InputError, UnsafeError, printable
from aniso.weights.dtypes import as_bytes
from aniso.weights.open_files import open_files

Progress = Callable[[int], None]
"""Called with the number of bytes just done."""

CHUNK = 1 << 20
_ALIGNMENT = 64  # bytes, as torch aligns its own memory
_reading = threading.local()


@final
class ReadBuffer:
    """Memory that is reused for tensors read repeatedly; it grows to the size used last time."""

    def __init__(self) -> None:
        self._bytes = _fresh(0)
        self._used = 0

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Read tensors of this thread into the buffer; they are valid until it is used again."""
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


class ByteFile(ABC):
    """Bytes that are read by position: of a file on disk, or of an object in a bucket."""

    label: str
    """The path or address, as it is shown in messages."""
    name: str
    """The last part of the path or address."""
    size: int
    piece = CHUNK
    """Bytes that are read at once by ``pieces``."""

    @abstractmethod
    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer with the bytes from ``offset`` on; raises if there are fewer."""

    def fetch(self, spans: Sequence[tuple[int, int]]) -> None:
        """Read ranges ahead, from start to stop, if reading each by itself takes long; a disk does not."""
        return

    def read(self, offset: int, size: int) -> bytes:
        data = bytearray(size)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def read_tensor(self, offset: int, nbytes: int) -> Tensor:
        """Read bytes as a uint8 tensor, aligned for any dtype; in the ``ReadBuffer`` in use, if any."""
        buffer: ReadBuffer | None = getattr(_reading, "buffer", None)
        out = buffer.take(nbytes) if buffer else _fresh(nbytes)
        if nbytes:
            self.read_into(as_bytes(out), offset)
        return out

    def head(self, size: int) -> bytes:
        return self.read(0, min(size, self.size))

    def sha256(self, progress: Progress | None = None) -> str:
        digest = hashlib.sha256()
        for part in self.pieces(0, self.size):
            digest.update(part)
            if progress:
                progress(len(part))
        return digest.hexdigest()

    def pieces(self, offset: int, size: int) -> Iterator[memoryview]:
        """Yield the bytes of a range in pieces, each valid until the next."""
        view = memoryview(bytearray(min(self.piece, size)))
        for start in range(0, size, self.piece):
            part = view[: min(self.piece, size - start)]
            self.read_into(part, offset + start)
            yield part


class RawFile(ByteFile):
    """A regular file with bounded, checked reads; a file that changes or is replaced raises an error.

    A thousand of them need few descriptors: the least recently used ones are closed, and opened again
    when they are read again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.label = printable(path)
        self.name = path.name
        self._place = Path(path).absolute()  # the working directory may change later
        fd = self._open()
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise InputError(
                "FILE-KIND",
                f"'{self.label}' is not a regular file",
                fix="name a file or a directory",
            )
        self.size = status.st_size
        self._state = _state(status)
        self._key = open_files.add(fd)

    def __del__(self) -> None:
        if hasattr(self, "_key") and open_files is not None:  # at interpreter exit it may be gone first
            open_files.close(self._key)

    @contextlib.contextmanager
    def _descriptor(self) -> Iterator[int]:
        """Yield an open descriptor that stays open while the block runs."""
        fd = open_files.borrow(self._key)
        if fd is None:
            fd = open_files.lend(self._key, self._reopened())
        try:
            yield fd
        finally:
            open_files.give_back(self._key)

    def _open(self) -> int:
        try:
            # non-blocking, so that opening a FIFO returns and can be refused
            return os.open(self._place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as e:
            if e.errno == errno.EMFILE and open_files.close_some():
                return self._open()
            code = "FILE-MISSING" if isinstance(e, FileNotFoundError) else "FILE-ACCESS"
            raise InputError(
                code,
                f"'{self.label}' cannot be opened",
                reason=e.strerror,
                fix=f"ls -l '{self.label}'",
            ) from None

    def _reopened(self) -> int:
        try:
            fd = self._open()
        except InputError as e:
            raise self._changed("was removed or closed", reason=e.facts.get("reason")) from None
        if _state(os.fstat(fd)) != self._state:
            os.close(fd)
            raise self._changed("was changed or replaced")
        return fd

    def read_into(self, buffer: memoryview, offset: int) -> None:
        with self._descriptor() as fd:
            done = 0
            while done < len(buffer):
                n = os.preadv(fd, [buffer[done : done + (64 << 20)]], offset + done)
                if n == 0:
                    found = os.fstat(fd).st_size
                    raise self._changed(
                        "became shorter", expected=f"{self.size} bytes", found=f"{found} bytes"
                    )
                done += n
            if _state(os.fstat(fd)) != self._state:
                raise self._changed("changed")

    @property
    def version(self) -> str:
        """The time of its last change and its size, which differ if the file was written again."""
        return f"{self._state[3]}-{self.size}"

    def stream(self) -> IO[bytes]:
        """Return the open file as a stream."""
        with self._descriptor() as fd:
            return os.fdopen(os.dup(fd), "rb")

    def _changed(self, what: str, *, expected: str = "", found: str = "", reason: object = "") -> InputError:
        return InputError(
            "FILE-CHANGED",
            f"'{self.label}' {what} while it was read",
            expected=expected,
            found=found,
            reason=reason,
            fix="make sure nothing writes to the file, then try again",
        )


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def refuse_unknown(file: ByteFile) -> InputError | UnsafeError:
    """Return the most helpful error for a file in an unknown format."""
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
            fix="check the download address, or name its directory",
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
