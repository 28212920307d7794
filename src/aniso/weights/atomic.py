"""Atomic writes: an output is the old one or the new one, never a part of it.

One file: temporary beside it, written, fsynced, read back and compared, renamed, directory fsynced.
Several files: a ``.partial`` directory that is renamed once its last file is in place.
Missing parent directories are created. Temporary files of a killed process are removed by the next process
that writes to the same place.
Every call that changes the disk goes through ``disk``, so that tests can fail any one of them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import re
import shutil
import stat
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from aniso.errors import LockedError, ResourceError, UsageError, printable
from aniso.weights.disk import Disk
from aniso.weights.files import RawFile
from aniso.weights.temporary import (
    TEMPORARY,
    TEMPORARY_FILE,
    abandoned,
    claim,
    directories_of,
    temporary_name,
)

_ATTEMPTS = 8  # it is rare that a cleaner finds a file before its writer has locked it


disk = Disk()


class HashedStream:
    """Sequential writes at one or more offsets of a new file, with a checksum of each region."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._regions: list[list[int]] = []  # [offset, length, crc32]
        self.seek(0)

    def seek(self, offset: int) -> None:
        self._regions.append([offset, 0, 0])

    def write(self, data: bytes | memoryview) -> None:
        region = self._regions[-1]
        view = memoryview(data).cast("B")
        region[2] = zlib.crc32(view, region[2])
        while view:
            n = disk.pwrite(self._fd, view[: 64 << 20], region[0] + region[1])
            if n <= 0:
                raise OSError(errno.EIO, "nothing could be written")
            region[1] += n
            view = view[n:]

    def verified_sha256(self, path: Path) -> str:
        """Read the file back; every region must hold what was written. Returns the hash of the whole file."""
        file = RawFile(path)
        if file.size != max(offset + length for offset, length, _ in self._regions):
            raise OSError(errno.EIO, "what was read back differs in length")
        digest = hashlib.sha256()
        position = 0
        for offset, length, crc in sorted(r for r in self._regions if r[1]):
            found = 0
            for piece in file.pieces(offset, length):
                found = zlib.crc32(piece, found)
                digest.update(piece)
            if found != crc or offset != position:
                raise OSError(errno.EIO, "what was read back differs from what was written")
            position = offset + length
        return digest.hexdigest()


class AtomicFile:
    """The file that ``atomic_file`` yields; ``sha256`` is set once the file is in place."""

    def __init__(self, stream: HashedStream) -> None:
        self.stream = stream
        self.sha256 = ""


@contextlib.contextmanager
def atomic_file(path: Path, *, overwrite: bool = False) -> Iterator[AtomicFile]:
    """Write ``path`` so that readers see the old content or the new, never a part."""
    path = Path(path)
    with os_errors(path):
        if path.is_dir():
            raise UsageError("OUT-EXISTS", f"'{printable(path)}' is a directory", fix="name a file")
        if path.exists() and not overwrite:
            raise _exists(path)
    sweep(path.parent, TEMPORARY_FILE)
    with os_errors(path), _parents_of(path):
        temporary, fd = _new_file(path)
        try:
            out = AtomicFile(HashedStream(fd))
            yield out
            if path.exists():
                os.fchmod(fd, stat.S_IMODE(path.stat().st_mode))
            disk.fsync(fd)
            out.sha256 = out.stream.verified_sha256(temporary)
            if path.exists() and not overwrite:  # created by another process meanwhile
                raise _exists(path)
            disk.replace(temporary, path)
            sync_directory(path.parent)
        except BaseException:
            disk.remove(temporary)
            raise
        finally:
            os.close(fd)


@contextlib.contextmanager
def atomic_directory(
    path: Path, *, overwrite: bool = False, ours: re.Pattern[str] | None = None
) -> Iterator[Path]:
    """Yield a temporary directory, which becomes ``path`` if the block succeeds.

    ``ours`` matches the names of files that such a directory holds: a directory with any other file in it is
    never replaced, even with ``overwrite``.
    """
    path = Path(path).absolute()  # so that "." has a name
    _put_back(path)
    require_free(path, overwrite=overwrite, ours=ours)
    sweep(path.parent, directories_of(path))
    with os_errors(path), _parents_of(path):
        partial, fd = _new_directory(path)
        try:
            yield partial
            sync_directory(partial)
            if path.is_dir():
                _require_free(path, overwrite, ours)  # another process may have filled it meanwhile
                partial.chmod(stat.S_IMODE(path.stat().st_mode))
                disk.exchange(partial, path)
                sync_directory(path.parent)
                disk.remove(partial)
            else:
                disk.replace(partial, path)
            sync_directory(path.parent)
        except BaseException:
            if partial.exists():
                disk.remove(partial)
            raise
        finally:
            os.close(fd)


def _new_file(path: Path) -> tuple[Path, int]:
    """Create a temporary file beside ``path``, locked for as long as it is open."""
    for attempt in range(_ATTEMPTS):
        temporary = temporary_name(path, hidden=True)
        fd = disk.create(temporary)
        if claim(fd, temporary) or attempt == _ATTEMPTS - 1:
            break
        os.close(fd)
    return temporary, fd


def _new_directory(path: Path) -> tuple[Path, int]:
    """Create a temporary directory beside ``path``, locked for as long as the descriptor is open."""
    for attempt in range(_ATTEMPTS):
        partial = temporary_name(path, hidden=False)
        disk.mkdir(partial)
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if claim(fd, partial) or attempt == _ATTEMPTS - 1:
                return partial, fd
            os.close(fd)
    raise OSError(errno.EIO, "a temporary directory vanished again and again")


def sweep(directory: Path, names: re.Pattern[str] = TEMPORARY) -> None:
    """Remove temporary outputs with such names whose writers have died."""
    with contextlib.suppress(OSError):  # failing to remove one does no harm
        for name in [entry.name for entry in os.scandir(directory) if names.fullmatch(entry.name)]:
            with abandoned(directory / name) as dead, contextlib.suppress(OSError):
                if dead:
                    disk.remove(directory / name)


def _put_back(path: Path) -> None:
    """Rename the old directory back if a process died while it swapped it for the new one in two steps."""
    if path.exists() or not path.parent.is_dir():
        return
    for old in sorted(path.parent.glob(f"{glob.escape(path.name)}.partial-old-*")):
        with abandoned(old) as dead:
            if dead:
                with os_errors(path):
                    disk.replace(old, path)
                return


@contextlib.contextmanager
def _parents_of(path: Path) -> Iterator[None]:
    """Create the missing directories above ``path``; if the block fails, empty ones are removed again."""
    made: list[Path] = []
    try:
        made += _create(path.parent)
        yield
        for directory in made:
            sync_directory(directory.parent)
    except BaseException:
        remove_empty(made)
        raise


def _create(directory: Path) -> list[Path]:
    """Create a directory and its parents; returns the new ones, outermost first."""
    missing = []
    while not directory.exists():
        missing.append(directory)
        directory = directory.parent
    made: list[Path] = []
    for one in reversed(missing):
        try:
            disk.mkdir(one)
        except FileExistsError:  # created by another process meanwhile
            continue
        except OSError:
            remove_empty(made)
            raise
        made.append(one)
    return made


def remove_empty(directories: Sequence[Path]) -> None:
    """Remove directories, given outermost first, as far as they are empty."""
    for one in reversed(directories):
        with contextlib.suppress(OSError):
            disk.rmdir(one)


def require_free(path: Path, *, overwrite: bool = False, ours: re.Pattern[str] | None = None) -> None:
    """Raise the error that ``atomic_directory`` would raise for this path."""
    path = Path(path).absolute()
    with os_errors(path):
        if path.exists() and not path.is_dir():
            raise UsageError("OUT-EXISTS", f"'{printable(path)}' is a file", fix="name a directory")
        _require_free(path, overwrite, ours)


def _require_free(path: Path, overwrite: bool, ours: re.Pattern[str] | None) -> None:
    """Raise unless the path is free, or holds only what may be replaced."""
    present = sorted(p.name for p in path.iterdir() if not _is_abandoned(p)) if path.is_dir() else []
    foreign = [name for name in present if ours is not None and not ours.fullmatch(name)]
    if foreign:
        raise UsageError(
            "OUT-EXISTS",
            f"'{printable(path)}' holds files that are not part of such an output",
            found=printable(", ".join(foreign)),
            fix="name an empty or a new directory",
        )
    if present and not overwrite:
        raise _exists(path)


def _is_abandoned(path: Path) -> bool:
    if not TEMPORARY.fullmatch(path.name):
        return False
    with abandoned(path) as dead:
        return dead


def make_directory(path: Path) -> list[Path]:
    """Create a directory if it does not exist; returns the new ones, outermost first."""
    with os_errors(path):
        made = _create(path)
        path.mkdir(exist_ok=True)  # a file in its place is an error
    return made


def write_text(path: Path, text: str, *, overwrite: bool = False) -> str:
    """Write a small text file atomically; returns its sha256."""
    with atomic_file(path, overwrite=overwrite) as out:
        out.stream.write(text.encode())
    return out.sha256


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        disk.fsync(fd)
    finally:
        os.close(fd)


def require_space(path: Path, nbytes: int) -> None:
    """Raise unless the disk of ``path`` has ``nbytes`` free and is writable."""
    parent = path.absolute()
    with os_errors(path):
        while not parent.exists():
            parent = parent.parent
    free = shutil.disk_usage(parent).free
    if nbytes > free:
        raise ResourceError(
            "OUT-SPACE",
            f"'{printable(path)}' does not fit on its disk",
            expected=f"{nbytes:,} bytes",
            found=f"{free:,} bytes free",
            fix="free some space, choose another disk, or a smaller storage (--storage int8)",
        )
    if not os.access(parent, os.W_OK) or (parent != path.absolute() and not parent.is_dir()):
        raise ResourceError(
            "OUT-WRITE", f"'{printable(parent)}' is not writable", fix="choose another output"
        )


@contextlib.contextmanager
def locked(directory: Path, *, shared: bool = False) -> Iterator[None]:
    """Lock a directory against changes by other processes; the lock ends with its process.

    Those who hold it ``shared`` change it together, and keep out who does not.
    """
    with os_errors(directory):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise LockedError(
                "OUT-LOCKED",
                f"'{printable(directory)}' is being changed by another process",
                found=_holder(fd),
                fix="wait for it to end, then run the command again",
            ) from None
        yield
    finally:
        os.close(fd)


def _holder(fd: int) -> str:
    """Return the process that holds the lock, where the system tells."""
    inode = f":{os.fstat(fd).st_ino}"
    try:
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return ""
    return next((f"process {words[4]}" for words in lines if len(words) > 5 and words[5].endswith(inode)), "")


def _exists(path: Path) -> UsageError:
    return UsageError("OUT-EXISTS", f"'{printable(path)}' exists", fix="add --overwrite to replace it")


@contextlib.contextmanager
def os_errors(path: Path) -> Iterator[None]:
    """Raise the system's errors as errors that name the output."""
    try:
        yield
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise ResourceError(
            "OUT-SPACE" if full else "OUT-WRITE",
            f"'{printable(path)}' could not be written",
            reason=e.strerror or str(e),
            fix="free some space or choose another disk" if full else "choose another output",
        ) from None
