"""Building the files that are fuzzed from their parts, with lengths and checksums that fit."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from typing import Any


def unpacked(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file and what follows it."""
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def packed(header: bytes | dict[str, Any], body: bytes) -> bytes:
    """A safetensors file of a header and what follows it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def zip_entries(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def zipped(entries: dict[str, bytes]) -> bytes:
    """An archive as torch writes it: nothing compressed, checksums right."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return out.getvalue()
