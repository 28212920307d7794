"""Hashes of tensors that do not depend on file format or dtype."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from aniso.errors import InputError, printable
from aniso.weights.dtypes import as_bytes

_CHUNK = 1 << 20


def tensor_hash(tensor: Tensor) -> str:
    """Return the sha256 of a tensor's shape and its values as float32 (integers as int64)."""
    kind = torch.float32 if tensor.is_floating_point() else torch.int64
    digest = hashlib.sha256(f"{tuple(tensor.shape)}\n".encode())
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):  # in pieces, so that casting needs little memory
        piece = flat[start : start + _CHUNK].to(kind).contiguous()
        digest.update(as_bytes(piece))
    return digest.hexdigest()


def combined_hash(parts: Mapping[str, str]) -> str:
    """Return one hash of names and hashes, in any order."""
    digest = hashlib.sha256()
    for name, value in sorted(parts.items()):
        digest.update(f"{name}\0{value}\n".encode())
    return digest.hexdigest()


def content_checksum(index: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of a small file's index and the bytes of its tensors, to detect damage."""
    digest = hashlib.sha256(index.encode("utf-8", "surrogatepass"))
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(as_bytes(tensor.detach().cpu().contiguous()))
    return digest.hexdigest()


def require_checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor], label: str) -> None:
    """Raise FILE-HASH if a file's metadata has a checksum that its index and tensors do not match.

    Files that were written before there were checksums have none and pass.
    """
    expected = metadata.get("checksum")
    found = content_checksum(metadata.get("index", ""), tensors)
    if expected not in (None, found):
        raise InputError(
            "FILE-HASH",
            f"'{label}' is damaged: its content does not match its checksum",
            expected=printable(expected),
            found=found,
            fix="restore the file from a copy, or make it again",
        )
