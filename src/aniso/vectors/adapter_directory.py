"""A directory of fine-tuned models and adapters as a bank, without building one on disk."""

from __future__ import annotations

import re
from pathlib import Path

from aniso.errors import AnisoError, InputError, printable
from aniso.progress import ProgressCallback
from aniso.vectors.bank import Bank
from aniso.vectors.block_source import BlockSource
from aniso.vectors.task_vector import TaskVector
from aniso.weights import Ref

_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_SHOWN = 12


def load_adapter_directory(
    base: Ref | BlockSource,
    directory: str | Path,
    *,
    skip_unfit: bool = False,
    progress: ProgressCallback | None = None,
) -> tuple[Bank, tuple[str, ...]]:
    """Return a bank of the models and adapters in a directory, and notes on those that do not fit the base.

    Names and shapes are compared now, values when they are read. A model that does not fit raises an error,
    unless ``skip_unfit`` leaves it out.
    """
    root = Path(directory).expanduser()
    if not root.is_dir():
        raise InputError(
            "FILE-MISSING", f"there is no directory '{printable(root)}'", fix="name a directory of adapters"
        )
    found = sorted(p for p in root.iterdir() if not p.name.startswith(".") and _is_model(p))
    blocks = BlockSource.of(base)
    vectors: dict[str, TaskVector] = {}
    unfit: list[str] = []
    for i, path in enumerate(found, 1):
        try:
            name = _vector_name(path, vectors)
            vectors[name] = TaskVector.between(blocks, path, name=name, check=False)
        except AnisoError as e:
            unfit.append(f"{printable(path.name)}: {e.message}")
        if progress:
            progress("reading adapters", i, len(found))
    if unfit and not skip_unfit:
        raise InputError(
            "BANK-BASE",
            f"{len(unfit)} of {len(found)} in '{printable(root)}' do not fit the base",
            found=unfit[:_SHOWN],
            more=f"{len(unfit) - _SHOWN} more" if len(unfit) > _SHOWN else "",
            fix="leave them out with --skip-unfit",
        )
    if not vectors:
        raise InputError(
            "FILE-MISSING",
            f"'{printable(root)}' holds nothing that fits the base",
            found=unfit[:_SHOWN] or "no adapter, and no file of weights",
            fix="name a directory with one adapter, or model, in each entry",
        )
    return Bank(vectors), tuple(f"left out: {reason}" for reason in unfit)


def _is_model(path: Path) -> bool:
    return path.is_dir() or path.suffix in _FILES


def _vector_name(path: Path, taken: dict[str, TaskVector]) -> str:
    stem = path.name if path.is_dir() else path.stem
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", stem).strip("-._+")[:100] or "vector"
    if name in taken:
        raise InputError("BANK-NAME", f"another entry has the same name '{name}'", fix="rename one of them")
    return name
