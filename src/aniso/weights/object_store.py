"""Files below an address: a directory, a bucket, a repository of the hub, or index pages of a web server.

Remote addresses are read through fsspec, by ranges. A request that fails is repeated a few times. Only the
protocols in ``aniso.addresses`` exist, so that no address can reach another of fsspec's file systems.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, final

from aniso.addresses import is_remote, require_address, root_of
from aniso.errors import AnisoError, InputError, ResourceError, printable
from aniso.weights.files import ByteFile, RawFile
from aniso.weights.hub import is_offline
from aniso.weights.remote_file import RemoteFile

UNREACHABLE = "REMOTE-READ"
"""The code of errors that may be gone when the same is read again."""
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "https": "aiohttp", "http": "aiohttp"}
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_ETAGS = ("ETag", "etag", "blob_id", "md5Hash", "Last-Modified", "LastModified", "mtime", "created")
_DEEPEST = 32
T = TypeVar("T")


@dataclass(frozen=True)
class StoredObject:
    """A file in a store. Its ETag changes when its content does; it is empty if the store has none."""

    uri: str
    size: int
    etag: str
    error: AnisoError | None = field(default=None, compare=False)
    """Why its size is not known; raised when it is read."""

    @property
    def name(self) -> str:
        return self.uri.rpartition("/")[2]


@dataclass(frozen=True)
class Retry:
    """How often a request is tried, and the seconds before the second try; they double each time."""

    attempts: int = 4
    pause: float = 0.5


@dataclass
class Traffic:
    """Requests for ranges, tries that failed, and bytes received."""

    requests: int = 0
    failures: int = 0
    nbytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, *, requests: int = 0, failures: int = 0, nbytes: int = 0) -> None:
        with self._lock:
            self.requests += requests
            self.failures += failures
            self.nbytes += nbytes


class ObjectStore(ABC):
    """The files below one address."""

    root: str

    @abstractmethod
    def objects(self, names: Collection[str]) -> Iterator[StoredObject]:
        """Yield every file with one of these names, at any depth."""

    @abstractmethod
    def file(self, one: StoredObject, known: bytes = b"") -> ByteFile:
        """Return a file to read; ``known`` are its first bytes, which are not read again."""


def store_at(address: str, retry: Retry | None = None, traffic: Traffic | None = None) -> ObjectStore:
    """Return the store of an address; nothing is read, and no connection is opened."""
    require_address(address)
    if is_remote(address):
        return RemoteStore(address, retry or Retry(), traffic or Traffic())
    return LocalStore(Path(address).expanduser())


@final
class LocalStore(ObjectStore):
    """A directory on disk."""

    def __init__(self, directory: Path) -> None:
        self.root = root_of(str(directory))

    def objects(self, names: Collection[str]) -> Iterator[StoredObject]:
        yield from self._below(self.root, frozenset(names), ())

    def _below(
        self, directory: str, names: frozenset[str], above: tuple[tuple[int, int], ...]
    ) -> Iterator[StoredObject]:
        """Follow links, but not into a directory that is being listed; hidden ones are left out."""
        try:
            status = Path(directory).stat()
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError as e:
            if not above:
                raise InputError(
                    "FILE-ACCESS",
                    f"'{printable(directory)}' cannot be listed",
                    reason=e.strerror,
                    fix=f"ls -l '{printable(directory)}'",
                ) from None
            return
        own = (status.st_dev, status.st_ino)
        if own in above or len(above) > _DEEPEST:
            return
        for entry in entries:
            if entry.name in names:
                yield self._object(entry)
            elif not entry.name.startswith(".") and entry.is_dir():
                yield from self._below(entry.path, names, (*above, own))

    @staticmethod
    def _object(entry: os.DirEntry[str]) -> StoredObject:
        try:
            status = entry.stat()
        except OSError:  # a broken link: reading it says so
            return StoredObject(entry.path, 0, "")
        return StoredObject(entry.path, status.st_size, f"{status.st_mtime_ns}-{status.st_size}")

    def file(self, one: StoredObject, known: bytes = b"") -> ByteFile:
        file = RawFile(Path(one.uri))
        if file.version != one.etag:
            raise InputError(
                "FILE-CHANGED", f"'{file.label}' has changed since it was listed", fix="refresh the catalogue"
            )
        return file


@final
class RemoteStore(ObjectStore):
    """Objects of a remote file system."""

    def __init__(
        self, address: str, retry: Retry, traffic: Traffic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.root = root_of(address)
        self.traffic = traffic
        self._protocol = address.partition("://")[0]
        _require_client(self._protocol, self.root)
        self._retry = retry
        self._sleep = sleep
        self._fs: Any = None
        self._lock = threading.Lock()

    @property
    def _system(self) -> Any:
        """The file system of fsspec, made when something is read."""
        with self._lock:
            if self._fs is None:
                import fsspec

                try:
                    self._fs = fsspec.filesystem(self._protocol)
                except Exception as e:  # wrong settings of a client, such as a malformed file of credentials
                    raise _unreadable(self.root, e, 1, final=False) from None
            return self._fs

    def objects(self, names: Collection[str]) -> Iterator[StoredObject]:
        system, wanted = self._system, frozenset(names)

        def listed() -> Mapping[str, Mapping[str, Any]]:
            system.invalidate_cache()
            found: Mapping[str, Mapping[str, Any]] = system.find(
                system._strip_protocol(self.root), detail=True
            )
            return found

        for path, info in sorted(self._tried(listed, self.root).items()):
            uri = self._uri(path)
            # a server may list what it likes: only what lies below the address belongs to it
            if path.rpartition("/")[2] in wanted and uri.startswith(f"{self.root}/") and "/../" not in uri:
                yield self._object(uri, path, info)

    def _object(self, uri: str, path: str, info: Mapping[str, Any]) -> StoredObject:
        if info.get("size") is None:  # index pages of web servers have names alone
            try:
                info = self._tried(lambda: self._system.info(path), uri)
            except InputError as e:
                return StoredObject(uri, 0, "", e)
        etag = next((str(info[key]) for key in _ETAGS if info.get(key)), "")
        size = int(info.get("size") or 0)
        return StoredObject(uri, size, f"{etag}-{size}" if etag else "")

    def _uri(self, path: str) -> str:
        return path if "://" in path else f"{self._protocol}://{path.lstrip('/')}"

    def file(self, one: StoredObject, known: bytes = b"") -> ByteFile:
        if one.error is not None:
            raise one.error
        return RemoteFile(one.uri, one.size, lambda start, stop: self._read(one, start, stop), known)

    def _read(self, one: StoredObject, start: int, stop: int) -> bytes:
        system = self._system
        path = system._strip_protocol(one.uri)

        def read() -> bytes:
            self.traffic.add(requests=1)
            if system.async_impl:
                data: bytes = system.cat_file(path, start=start, end=stop)
            else:  # without its cache, which reads megabytes ahead
                with system.open(path, "rb", cache_type="none", size=one.size) as stream:
                    stream.seek(start)
                    data = stream.read(stop - start)
            self.traffic.add(nbytes=len(data))
            if len(data) != stop - start:
                raise OSError(f"{len(data)} bytes instead of {stop - start}")
            return data

        return self._tried(read, one.uri)

    def _tried(self, request: Callable[[], T], uri: str) -> T:
        """Return the result of a request, which is repeated if it fails."""
        for attempt in range(1, self._retry.attempts + 1):
            try:
                return request()
            except Exception as e:  # clients of object stores have errors of their own, without a common base
                self.traffic.add(failures=1)
                # for web servers, fsspec calls whatever fails a missing file
                final = isinstance(e, _FINAL) and not self._protocol.startswith("http")
                if final or attempt == self._retry.attempts:
                    raise _unreadable(uri, e, attempt, final=final) from None
                self._sleep(self._retry.pause * 2 ** (attempt - 1))
        raise AssertionError


def _require_client(protocol: str, address: str) -> None:
    """Raise if aniso is offline, or if the package that reads such addresses is missing."""
    if is_offline() and protocol != "memory":
        raise InputError(
            "HUB-OFFLINE",
            f"'{printable(address)}' cannot be read: aniso is offline",
            fix="unset ANISO_OFFLINE and HF_HUB_OFFLINE",
        )
    package = _PACKAGES.get(protocol)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ResourceError(
            "REMOTE-PACKAGE",
            f"{protocol}:// needs the package {package}",
            fix="pip install 'aniso[remote]'",
        )


def _unreadable(uri: str, error: Exception, attempts: int, *, final: bool) -> InputError:
    lines = str(error).splitlines() or [""]
    missing = final and isinstance(error, FileNotFoundError)
    return InputError(
        "FILE-MISSING" if missing else "FILE-ACCESS" if final else UNREACHABLE,
        f"'{printable(uri)}' does not exist" if missing else f"'{printable(uri)}' cannot be read",
        reason=printable(f"{type(error).__name__}: {lines[0]}", 120),
        tries=attempts if attempts > 1 else "",
        fix="check the address, your login and the connection, then try again",
    )
