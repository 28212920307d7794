"""Checks of arguments that need no torch: mistakes are reported in a fraction of a second.

Whatever passes is checked again, and more strictly, where it is used.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from aniso.errors import InputError, UsageError, printable

STORAGES = ("fp32", "fp16", "bf16", "int8", "int4", "residual4", "residual2")
_SVD = re.compile(r"svd:[1-9][0-9]{0,4}")
DTYPES = ("fp32", "fp16", "bf16")
SPLITS = ("train", "val", "test")
CHECKPOINTS = ("safetensors", "open_clip", "huggingface")
BAKED = (*CHECKPOINTS, "sentence-transformers", "dual-encoder", "peft", "onnx")


def one_of(option: str, value: str | None, allowed: Sequence[str]) -> None:
    """Require one of the allowed values of an option; None is the default."""
    if value is not None and value not in allowed:
        choices = " or ".join(part for part in (", ".join(allowed[:-1]), allowed[-1]) if part)
        raise UsageError(
            "USAGE",
            f"invalid value '{printable(value)}' for {option}: choose {choices}",
            fix=f"{option} {allowed[0]}",
        )


def known_storage(value: str | None) -> None:
    """Require a storage of vectors, if one was given."""
    if value is not None and not _SVD.fullmatch(value):
        one_of("--storage", value, (*STORAGES, "svd:K"))


def hub_id(option: str, value: str | None) -> None:
    """Require the id of a repository on the hub, if one was given."""
    if value is not None and not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", value):
        raise UsageError(
            "USAGE", f"invalid value '{printable(value)}' for {option}: write OWNER/NAME", fix="OWNER/NAME"
        )


def existing_file(path: Path | None) -> None:
    """Require a file that was named, if one was."""
    if path is not None and not _is_there(path):
        raise InputError(
            "FILE-MISSING", f"'{printable(path)}' does not exist", fix=f"ls '{printable(path.parent)}'"
        )


def free_file(path: Path | None, *, overwrite: bool) -> None:
    """Require that a file to write does not exist, unless it may be overwritten."""
    if path is not None and path.is_dir():
        raise UsageError("OUT-EXISTS", f"'{printable(path)}' is a directory", fix="name a file")
    if path is not None and _is_there(path) and not overwrite:
        raise UsageError("OUT-EXISTS", f"'{printable(path)}' exists", fix="add --overwrite to replace it")


def existing_bank(name: str | Path | None) -> None:
    """Require a directory with a manifest, a bundled bank such as ``mini``, or ``random:N``."""
    if name is None or (Path(name) / "manifest.json").exists():
        return
    by_name = not Path(name).exists() and re.fullmatch(r"mini[\w-]*|random:[0-9:]+", str(name))
    if not by_name:
        raise InputError(
            "BANK-MANIFEST",
            f"'{printable(name)}' is not a bank: it has no manifest.json",
            fix="make one with: aniso bank build --base BASE NAME=FILE … -o DIR",
        )


def existing_weights(ref: str) -> None:
    """Require a file or directory, unless the reference may be a hub id or the name of a model."""
    text = ref.partition("::")[0]
    is_file_name = text.endswith((".safetensors", ".pt", ".pth", ".bin", ".ckpt"))
    if not text.startswith(("~", "hub:")) and is_file_name and not _is_there(Path(text)):
        raise InputError(
            "FILE-MISSING",
            f"'{printable(text)}' does not exist",
            expected="a file, a directory, or a hub id owner/name[@revision]",
            fix=f"ls '{printable(Path(text).parent)}'",
        )


def existing_task(name: str) -> None:
    """Require a path or the name of a known task; a name that looks like a path is left to the reader."""
    known = {path.name.removesuffix(".toml") for path in _catalogue().iterdir()}
    if name in known or "/" in name or name.endswith(".toml") or Path(name).expanduser().exists():
        return
    near = difflib.get_close_matches(name, sorted(known), 3)
    raise InputError(
        "DATA-MISSING",
        f"'{printable(name)}' is neither a known task nor a directory",
        likely=f"you meant {' or '.join(near)}" if near else "",
        fix="aniso task ls",
    )


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()  # broken links are reported where they are opened


def _catalogue() -> Path:
    """Cards of the known tasks, found without importing ``aniso.data``."""
    return Path(str(resources.files("aniso"))) / "data" / "catalogue"
