"""Checkpoints written by ``torch.save``: the zip format, and the legacy format before torch 1.6."""

from __future__ import annotations

import contextlib
import io
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, cast, final

import torch
from torch import Tensor

from aniso.errors import AnisoError, InputError, UnsafeError, printable
from aniso.weights.dtypes import BITS, TORCH, as_bytes
from aniso.weights.files import RawFile
from aniso.weights.pickle import LEGACY_MAGIC, MAX_BYTES, Machine
from aniso.weights.pickle_values import TensorView, over_limit
from aniso.weights.source import (
    PickleReport,
    SourceInfo,
    TensorInfo,
    WeightSource,
    check_name,
    is_possible,
)
from aniso.weights.state_dict import Found, find_state_dict

_ZIP = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_MAX_ENTRIES = 200_000
_MAX_DIRECTORY = 16 << 20  # bytes; an entry takes 46 of them and its name


def looks_like_torch(head: bytes) -> bool:
    # protocol 2 and later begin with \x80; the older ones with one of these opcodes
    return head.startswith((_ZIP, b"\x80")) or head[:1] in (b"(", b"]", b"}", b"c")


@dataclass(frozen=True)
class _Region:
    """The position of a storage in the file."""

    offset: int
    nbytes: int
    crc: int | None


@final
class TorchFile(WeightSource):
    """A ``torch.save`` file: its pickle is interpreted, never run; storages are read when used."""

    def __init__(self, file: RawFile, entry: str = "", *, tensors_only: bool = False) -> None:
        self.label = file.label
        self._file = file
        machine = Machine()
        zipped = file.head(4) == _ZIP
        try:
            with _about(file):
                root, self._regions = (_read_zip if zipped else _read_legacy)(file, machine)
                if machine.report.calls and not tensors_only:
                    raise calls_error(self.label, machine.report)
                found = self._state_dict(root, entry)
        except AnisoError as e:
            # whatever else is wrong, a file that would call functions is reported as unsafe
            if e.exit_code == UnsafeError.exit_code or not machine.report.calls:
                raise
            raise calls_error(self.label, machine.report, e) from None
        report = machine.report
        notes = list(found.notes)
        if report.classes:
            notes.append(f"classes recorded by name only: {printable(', '.join(report.classes[:12]))}")
        if report.calls:
            notes.append(f"calls not executed: {printable(', '.join(report.calls))}")
        self.info = SourceInfo("torch zip" if zipped else "torch legacy", tuple(notes), report)
        self._tensors = {n: TensorInfo(v.dtype, v.shape) for n, v in self._views.items()}
        self._verified: set[str] = set()

    def _state_dict(self, root: object, entry: str) -> Found:
        """Return the state dict in the pickle, with every tensor checked."""
        found = find_state_dict(root, entry, self.label)
        self._views = found.tensors
        for name, view in self._views.items():
            check_name(self.label, name)
            self._check(name, view)
        return found

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @property
    def files(self) -> tuple[RawFile, ...]:
        return (self._file,)

    @property
    def aliases(self) -> Mapping[str, str]:
        first: dict[str, str] = {}
        out = {}
        for name, v in self._views.items():
            # a text, because numbers are hashed without a secret and could all be chosen to collide
            view = f"{v.dtype} {v.offset} {v.shape} {v.stride} {v.storage.key}"
            same = first.setdefault(view, name)
            if same != name:
                out[name] = same
        return out

    def _load(self, name: str) -> Tensor:
        view = self._views[name]
        if view.numel == 0:
            return torch.empty(view.shape, dtype=TORCH[view.dtype])
        region = self._regions[view.storage.key]
        size = BITS[view.dtype] // 8
        if region.crc is not None and view.storage.key not in self._verified:
            # the checksum covers the whole storage, so the first read of one reads all of it
            raw = self._file.read_tensor(region.offset, region.nbytes)
            if zlib.crc32(as_bytes(raw)) != region.crc:
                raise InputError(
                    "ZIP-CRC",
                    f"'{self.label}' is damaged: a checksum does not match",
                    key=name,
                    fix="download it again",
                )
            self._verified.add(view.storage.key)
            raw = raw[view.offset * size : (view.offset + view.span) * size]
            if raw.storage_offset() % size:
                raw = raw.clone()
        else:
            raw = self._file.read_tensor(region.offset + view.offset * size, view.span * size)
        out = raw.view(TORCH[view.dtype]).as_strided(view.shape, view.stride).contiguous()
        return out.as_strided((view.numel,), (1,)).view(view.shape)  # one element may keep any stride

    def _check(self, name: str, view: TensorView) -> None:
        region = self._regions.get(view.storage.key)
        if region is None:
            raise InputError(
                "FILE-TRUNCATED",
                f"'{self.label}' lacks the data of a tensor",
                key=name,
                fix="download it again",
            )
        size = BITS[view.dtype] // 8
        declared = view.storage.numel * view.storage.itemsize
        if declared != region.nbytes:
            raise UnsafeError(
                "PICKLE-STORAGE",
                f"'{self.label}' declares a storage of a different size than it holds",
                key=name,
                expected=f"{declared} bytes",
                found=f"{region.nbytes} bytes",
                fix="download it again from a source you trust",
            )
        inside = view.numel == 0 or (
            min(view.stride, default=0) >= 0
            and (view.offset + view.span) * size <= region.nbytes
            and view.numel * size <= region.nbytes
        )
        if not inside or view.offset < 0 or not is_possible(view.shape):
            raise UnsafeError(
                "PICKLE-VIEW",
                f"'{self.label}' has a view larger than its storage",
                key=name,
                found=f"shape {view.shape}, stride {view.stride}, offset {view.offset} "
                f"in a storage of {region.nbytes} bytes",
                fix="download it again from a source you trust",
            )


def calls_error(label: str, report: PickleReport, other: AnisoError | None = None) -> UnsafeError:
    """Return the error for a pickle that would call functions, and what else is wrong with it."""
    return UnsafeError(
        "PICKLE-CALL",
        f"'{label}' contains calls to {', '.join(report.calls[:5])}; not executed",
        also=other.message if other else "",
        fix=other.fix if other else f"aniso convert --tensors-only '{label}' -o tensors.safetensors",
    )


@contextlib.contextmanager
def _about(file: RawFile) -> Iterator[None]:
    """Add the file's name to errors from inside the pickle."""
    try:
        yield
    except AnisoError as e:
        if file.label not in e.message:
            e.message = f"'{file.label}': {e.message}"
        raise


def _read_zip(file: RawFile, machine: Machine) -> tuple[object, dict[str, _Region]]:
    entries = _zip_entries(file)
    pickles = [name for name in entries if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(pickles) > 1:
        raise _zip_unsafe(file, "more than one pickle", ", ".join(pickles))
    if not pickles:
        raise InputError(
            "FILE-FORMAT",
            f"'{file.label}' is a zip archive that torch.save did not write",
            found=printable(", ".join(list(entries)[:6])),
            fix="unpack it and name the file inside",
        )
    folder = pickles[0].removesuffix("data.pkl")
    _check_byte_order(file, entries.get(f"{folder}byteorder"))
    main = entries[pickles[0]]
    if main.nbytes > MAX_BYTES:
        raise UnsafeError(
            "PICKLE-LIMIT",
            f"'{file.label}' has a pickle of {main.nbytes} bytes",
            fix="ask its author for a safetensors file",
        )
    data = file.read(main.offset, main.nbytes)
    if zlib.crc32(data) != main.crc:
        raise InputError("ZIP-CRC", f"'{file.label}' is damaged", key="data.pkl", fix="download it again")
    root = machine.run(io.BytesIO(data))
    prefix = f"{folder}data/"
    return root, {n.removeprefix(prefix): r for n, r in entries.items() if n.startswith(prefix)}


def _check_byte_order(file: RawFile, region: _Region | None) -> None:
    if region is not None and file.read(region.offset, min(region.nbytes, 16)) != b"little":
        raise InputError(
            "PICKLE-UNSUPPORTED",
            f"'{file.label}' was written on a big-endian machine",
            fix="save it again with safetensors",
        )


def _zip_entries(file: RawFile) -> dict[str, _Region]:
    """Return every entry's position; raises unless all are stored, distinct and in bounds."""
    try:
        with file.stream() as stream, zipfile.ZipFile(cast(Any, _Directory(stream))) as archive:
            infos = archive.infolist()
            comment = archive.comment
    except (zipfile.BadZipFile, EOFError, struct.error, ValueError, NotImplementedError) as e:
        raise InputError(
            "FILE-TRUNCATED",
            f"'{file.label}' is a truncated or damaged checkpoint",
            reason=printable(e),
            fix="download it again",
        ) from None
    if any("/code/" in f"/{info.filename}" or info.filename.endswith("constants.pkl") for info in infos):
        raise InputError(
            "TORCHSCRIPT",
            f"'{file.label}' is a TorchScript archive",
            fix="load it with torch.jit.load where you trust it, and save its state_dict",
        )
    if len(infos) > _MAX_ENTRIES:
        raise _zip_unsafe(file, f"{len(infos)} entries")
    if comment:
        raise _zip_unsafe(file, "a comment behind the archive")
    entries: dict[str, _Region] = {}
    spans = []
    for info in infos:
        region = _zip_entry(file, info)
        if info.filename in entries:
            raise _zip_unsafe(file, "two entries of one name", info.filename)
        entries[info.filename] = region
        spans.append((info.header_offset, region.offset + region.nbytes, info.filename))
    position = 0
    for begin, end, name in sorted(spans):
        if begin < position or end > file.size or (position == 0 and begin != 0):
            raise _zip_unsafe(file, "entries that overlap or leave the file", name)
        position = end
    return entries


class _Directory:
    """A stream that raises if a zip archive's directory is too long to be read at once.

    Python's reader makes an object of 600 bytes of every 46 bytes, before anything can be checked.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.seek, self.tell, self.seekable = stream.seek, stream.tell, stream.seekable

    def read(self, size: int = -1) -> bytes:
        if size > _MAX_DIRECTORY:
            raise over_limit(f"an archive with a directory of {size} bytes")
        return self._stream.read(size)


def _zip_entry(file: RawFile, info: zipfile.ZipInfo) -> _Region:
    name = info.filename
    if info.flag_bits & 0x1:
        raise _zip_unsafe(file, "an encrypted entry", name)
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise _zip_unsafe(file, "a compressed entry, which torch never writes", name)
    if name.startswith("/") or "\\" in name or ".." in name.split("/"):
        raise _zip_unsafe(file, "a name that leaves the archive", name)
    if not 0 <= info.header_offset <= file.size - _LOCAL_HEADER.size:
        raise _zip_unsafe(file, "an entry outside of the file", name)
    fields = _LOCAL_HEADER.unpack(file.read(info.header_offset, _LOCAL_HEADER.size))
    name_length, extra_length = fields[9], fields[10]
    data_offset = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    if fields[0] != _ZIP or data_offset + info.file_size > file.size:
        raise _zip_unsafe(file, "an entry outside of the file", name)
    local = file.read(info.header_offset + _LOCAL_HEADER.size, name_length)
    if local != info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437"):
        raise _zip_unsafe(file, "an entry with two names", name)
    return _Region(data_offset, info.file_size, info.CRC)


def _zip_unsafe(file: RawFile, found: str, name: str = "") -> UnsafeError:
    return UnsafeError(
        "ZIP-UNSAFE",
        f"'{file.label}' is not an archive that torch wrote",
        entry=printable(name),
        found=found,
        fix="download it again from a source you trust",
    )


def _read_legacy(file: RawFile, machine: Machine) -> tuple[object, dict[str, _Region]]:
    """Read five pickles (magic, version, system, the object, the storages' keys), then the storages."""
    with file.stream() as stream:
        stream.seek(0)
        first = machine.run(stream)
        if first != LEGACY_MAGIC:
            return first, {}  # a plain pickle: it can hold no storages
        machine.run(stream)
        system = machine.run(stream)
        if isinstance(system, dict) and system.get("little_endian") is False:
            raise InputError(
                "PICKLE-UNSUPPORTED",
                "written on a big-endian machine",
                fix="save it again with safetensors",
            )
        root = machine.run(stream)
        keys = machine.run(stream)
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise UnsafeError(
                "PICKLE-MALFORMED",
                "the list of storages is not a list of names",
                fix="ask its author for a safetensors file",
            )
        return root, _legacy_regions(file, stream, keys, machine)


def _legacy_regions(
    file: RawFile, stream: IO[bytes], keys: list[str], machine: Machine
) -> dict[str, _Region]:
    regions = {}
    position = stream.tell()
    for key in keys:
        storage = machine.storages.get(key)
        if storage is None or key in regions:
            raise UnsafeError(
                "PICKLE-MALFORMED",
                f"storage {printable(key)} is listed but not used",
                fix="ask its author for a safetensors file",
            )
        nbytes = storage.numel * storage.itemsize
        if storage.numel < 0 or position + 8 + nbytes > file.size:
            raise InputError(
                "FILE-TRUNCATED",
                f"truncated: storage {printable(key)} needs {nbytes} bytes, "
                f"{max(0, file.size - position - 8)} are left",
                fix="download it again",
            )
        (numel,) = struct.unpack("<q", file.read(position, 8))
        if numel != storage.numel:
            raise UnsafeError(
                "PICKLE-STORAGE",
                f"storage {printable(key)} has a different size than declared",
                expected=storage.numel,
                found=numel,
                fix="download it again from a source you trust",
            )
        regions[key] = _Region(position + 8, nbytes, None)
        position += 8 + nbytes
    return regions
