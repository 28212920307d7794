"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aniso.errors import UsageError, printable

if TYPE_CHECKING:
    import torch

Base = Annotated[str, typer.Option("--base", help="The base model: a file, a directory, or a hub id.")]
Bank = Annotated[Path, typer.Option("--bank", help="The bank: a directory.")]
Storage = Annotated[
    str, typer.Option("--storage", help="fp32, fp16, bf16, int8, int4, residual4 or residual2.")
]
SkipKey = Annotated[
    list[str] | None,
    typer.Option("--skip-key", help="Leave out keys that match this pattern; may be repeated."),
]
Rename = Annotated[list[str] | None, typer.Option("--rename", help="OLD=NEW: rename a key; may be repeated.")]
AllowDistant = Annotated[
    bool, typer.Option("--allow-distant", help="Accept a model that is far from the base.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
Scheme = Annotated[
    str,
    typer.Option(
        "--scheme", help="Naming of the base: auto, hf-clip-vit, openclip-vit, openclip-visual, plain."
    ),
]
Activation = Annotated[
    str | None, typer.Option("--activation", help="The base's activation, if its files do not say.")
]


def dtype(name: str | None) -> torch.dtype | None:
    """A float format by its short name."""
    if name is None:
        return None
    from aniso.vectors.convert import DTYPES

    if name not in DTYPES:
        raise UsageError(
            "USAGE",
            f"there is no dtype '{printable(name)}'",
            expected=", ".join(DTYPES),
            fix="choose one of these with --dtype",
        )
    return DTYPES[name]


def renames(pairs: list[str] | None) -> dict[str, str]:
    out = {}
    for pair in pairs or ():
        old, equals, new = pair.partition("=")
        if not (old and equals and new):
            raise UsageError(
                "USAGE", f"'--rename {pair}' does not say what to call what", fix="--rename OLD=NEW"
            )
        out[old] = new
    return out


def named_files(items: list[str]) -> dict[str, str]:
    """``NAME=FILE`` or ``FILE``, which is then called by its own name."""
    out: dict[str, str] = {}
    for item in items:
        name, equals, ref = item.partition("=")
        # an equals sign may be part of a path, as in runs/lr=1e-5/model.safetensors
        if not equals or "/" in name or Path(item.partition("::")[0]).exists():
            path = Path(item.partition("::")[0])
            if not path.exists():
                path = Path(item.partition("@")[0])  # a hub id with its revision
            name, ref = path.stem if path.is_file() else path.name, item
        if name in out:
            raise UsageError(
                "BANK-NAME", f"two vectors are called '{name}'", fix="write NAME=FILE to name them"
            )
        out[name] = ref
    return out
