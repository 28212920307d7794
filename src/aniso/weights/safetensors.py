"""safetensors files: strict reading that names the tensor at fault, and streamed writing."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict, cast, final

import torch
from torch import Tensor

from aniso.errors import AnisoError, InputError, UnsafeError, printable
from aniso.json_value import JsonObject
from aniso.weights.atomic import HashedStream, atomic_file
from aniso.weights.dtypes import BITS, NAMES, TORCH, as_bytes
from aniso.weights.files import ByteFile
from aniso.weights.jsontext import JsonError, parse_object
from aniso.weights.source import SourceInfo, TensorInfo, WeightSource, check_name, is_possible

_HEADER_LIMIT = 64 << 20  # with the spaces that writers leave at its end
_TEXT_LIMIT = 32 << 20
_VALUES_LIMIT = 3_000_000
"""Values in a header: room for 250,000 tensors, more than twice as many as any model has."""
_MAX_DIMENSIONS = 64
_LENGTH = struct.Struct("<Q")


def looks_like_safetensors(head: bytes) -> bool:
    # the length before the brace is binary; a JSON text may have a brace there, too
    length = head[:8]
    return head[8:9] == b"{" and (b"\0" in length or not length.isascii())


@final
class SafetensorsFile(WeightSource):
    """One safetensors file, checked in full when opened."""

    def __init__(self, file: ByteFile) -> None:
        self.label = file.label
        self.info = SourceInfo("safetensors")
        self._file = file
        header, start = _read_header(file)
        self.metadata = _metadata(file, header.pop("__metadata__", {}))
        self._tensors: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        spans = []
        for name, entry in header.items():
            check_name(file.label, name)
            info, begin, end = _entry(file, name, entry)
            self._tensors[name] = info
            self._offsets[name] = start + begin
            spans.append((begin, end, name))
        _check_spans(file, spans, file.size - start)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @property
    def files(self) -> tuple[ByteFile, ...]:
        return (self._file,)

    def _load(self, name: str) -> Tensor:
        info = self._tensors[name]
        dtype = _torch_dtype(self.label, name, info)
        raw = self._file.read_tensor(self._offsets[name], info.nbytes)
        return raw.view(dtype).reshape(info.shape)

    def prefetch(self, names: Iterable[str]) -> None:
        spans = [(self._offsets[name], self._offsets[name] + self._tensors[name].nbytes) for name in names]
        self._file.fetch(spans)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows ``start:stop`` of a tensor; only their bytes are read."""
        info = self._tensors[name]
        dtype = _torch_dtype(self.label, name, info)
        row = info.nbytes // info.shape[0] if info.shape[0] else 0
        raw = self._file.read_tensor(self._offsets[name] + start * row, (stop - start) * row)
        return raw.view(dtype).reshape(stop - start, *info.shape[1:])


def _torch_dtype(label: str, name: str, info: TensorInfo) -> torch.dtype:
    if info.dtype not in TORCH:
        raise InputError(
            "WEIGHT-DTYPE",
            f"'{label}' has a tensor in a format that cannot be computed with",
            key=name,
            found=info.dtype,
            expected="F16, BF16, F32 or F64",
            fix="convert it to BF16 with the tool that quantised it",
        )
    return TORCH[info.dtype]


def _read_header(file: ByteFile) -> tuple[JsonObject, int]:
    if file.size < _LENGTH.size:
        raise _truncated(file, _LENGTH.size)
    (length,) = _LENGTH.unpack(file.read(0, 8))
    if length > _HEADER_LIMIT:
        raise UnsafeError(
            "ST-HEADER",
            f"'{file.label}' declares a header of {length} bytes",
            expected=f"at most {_HEADER_LIMIT}",
            fix="download it again from a source you trust",
        )
    if 8 + length > file.size:
        raise _truncated(file, 8 + length)
    text = file.read(8, length).rstrip(b" ")
    try:
        return parse_object(text, largest=_TEXT_LIMIT, most_values=_VALUES_LIMIT), 8 + length
    except JsonError as e:
        raise UnsafeError(
            "ST-HEADER",
            f"'{file.label}' has a malformed header",
            reason=printable(e),
            fix="download it again from a source you trust",
        ) from None


def _truncated(file: ByteFile, expected: int) -> InputError:
    return InputError(
        "FILE-TRUNCATED",
        f"'{file.label}' is truncated: its header says {expected} bytes, the file has {file.size}",
        fix="download it again",
    )


def _metadata(file: ByteFile, value: object) -> dict[str, str]:
    if isinstance(value, dict) and all(isinstance(v, str) for v in value.values()):
        return value
    raise UnsafeError(
        "ST-HEADER",
        f"'{file.label}' has metadata that is not text",
        fix="download it again from a source you trust",
    )


def _entry(file: ByteFile, name: str, entry: object) -> tuple[TensorInfo, int, int]:
    match entry:
        case {
            "dtype": str(dtype),
            "shape": list(shape),
            "data_offsets": [int(begin), int(end)],
        } if (
            len(cast(Any, entry)) == 3
            and type(begin) is type(end) is int
            and len(shape) <= _MAX_DIMENSIONS
            and dtype in BITS
            and all(type(n) is int and 0 <= n < 2**63 for n in shape)
            and is_possible(tuple(shape))
        ):
            info = TensorInfo(dtype, tuple(shape))
        case _:
            raise _offsets_error(file, name, printable(json.dumps(entry), 100))
    if begin > end or info.nbytes != end - begin:
        raise _offsets_error(
            file, name, f"{dtype} {info.shape} needs {info.nbytes} bytes, offsets {begin}:{end}"
        )
    return info, begin, end


def _check_spans(file: ByteFile, spans: list[tuple[int, int, str]], available: int) -> None:
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise _offsets_error(file, name, f"begins at {begin}, the tensor before ends at {position}")
        position = end
    if position > available:
        raise _truncated(file, file.size - available + position)
    if position < available:
        raise UnsafeError(
            "ST-TRAILING",
            f"'{file.label}' has {available - position} extra bytes after its last tensor",
            fix="download it again from a source you trust",
        )


def _offsets_error(file: ByteFile, name: str, found: str) -> AnisoError:
    return UnsafeError(
        "ST-OFFSETS",
        f"'{file.label}' has an inconsistent header",
        key=name,
        found=found,
        fix="download it again from a source you trust",
    )


class _Entry(TypedDict):
    """A tensor's entry in the header of a safetensors file."""

    dtype: str
    data_offsets: list[int]
    shape: list[int]


class SafetensorsWriter:
    """Writes a safetensors file tensor by tensor; sizes need not be known in advance.

    The header is at the front of the file, so room is reserved for it and the unused rest is filled with
    spaces, which the format allows.
    """

    def __init__(self, stream: HashedStream, room: int) -> None:
        self._stream = stream
        self._room = (room + 7) // 8 * 8
        self._entries: dict[str, _Entry] = {}
        self._open: str | None = None
        self._position = 0
        stream.seek(8 + self._room)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a complete tensor."""
        if tensor.dtype not in NAMES:
            raise InputError(
                "WEIGHT-DTYPE",
                "a tensor is in a format that cannot be saved",
                key=name,
                found=tensor.dtype,
                expected=", ".join(TORCH),
                fix="convert it first",
            )
        self.begin(name, NAMES[tensor.dtype])
        self.append(tensor)
        self.end(tuple(tensor.shape))

    def begin(self, name: str, dtype: str) -> None:
        """Start a tensor whose data follows in pieces."""
        if name in self._entries or name == "__metadata__" or self._open is not None:
            raise ValueError(f"{name} is written twice, or inside {self._open}")
        self._entries[name] = {"dtype": dtype, "data_offsets": [self._position], "shape": []}
        self._open = name

    def append(self, piece: Tensor) -> None:
        data = as_bytes(piece.detach().contiguous())
        self._stream.write(data)
        self._position += len(data)

    def end(self, shape: tuple[int, ...]) -> None:
        assert self._open is not None
        entry = self._entries[self._open]
        begin = entry["data_offsets"][0]
        expected = TensorInfo(entry["dtype"], shape).nbytes
        if self._position - begin != expected:
            raise ValueError(f"{self._open}: {self._position - begin} bytes written, not {expected}")
        entry["shape"], entry["data_offsets"] = list(shape), [begin, self._position]
        self._open = None

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Write the header, which ends the file."""
        header = json.dumps(
            {"__metadata__": dict(sorted(metadata.items())), **self._entries},
            ensure_ascii=True,
            separators=(",", ":"),
        ).encode()
        if len(header) > self._room:
            raise ValueError(f"header needs {len(header)} bytes, {self._room} are reserved")
        self._stream.seek(0)
        self._stream.write(_LENGTH.pack(self._room) + header.ljust(self._room))


def header_room(names: Iterable[str], metadata: int = 4096) -> int:
    """Return an upper bound on the size of a header with these names."""
    return metadata + sum(len(json.dumps(name)) + 160 for name in names)


def save_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = False,
) -> str:
    """Write named tensors atomically; returns the file's sha256."""
    meta = dict(metadata or {})
    extra = sum(len(json.dumps(k + v)) + 8 for k, v in meta.items()) + sum(
        40 * t.ndim for t in tensors.values()
    )
    room = header_room(tensors, 256 + extra)
    with atomic_file(path, overwrite=overwrite) as out:
        writer = SafetensorsWriter(out.stream, room)
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.finish(meta)
    return out.sha256


__all__ = [
    "SafetensorsFile",
    "SafetensorsWriter",
    "header_room",
    "looks_like_safetensors",
    "save_safetensors",
]
