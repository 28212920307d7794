"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aniso.cli import checks
from aniso.errors import UsageError, printable

if TYPE_CHECKING:
    import torch

    from aniso.data.task import OnBadImage as OnBad
    from aniso.vectors import Bank as BankType
    from aniso.weights import Ref

Base = Annotated[
    str, typer.Option("--base", help="A file, a directory, a hub id, NAME:TAG of open_clip, or mini.")
]
Bank = Annotated[Path, typer.Option("--bank", help="The bank: a directory, or mini.")]
Storage = Annotated[
    str,
    typer.Option(
        "--storage",
        help="fp32, fp16, bf16, int8, int4, residual4, residual2, or svd:K for K singular components.",
    ),
]
SkipKey = Annotated[
    list[str] | None,
    typer.Option("--skip-key", help="Leave out keys that match this pattern; may be repeated."),
]
Rename = Annotated[list[str] | None, typer.Option("--rename", help="OLD=NEW: rename a key; may be repeated.")]
AllowDistant = Annotated[
    bool, typer.Option("--allow-distant", help="Accept a model that is far from the base.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing output.")]
Scheme = Annotated[
    str,
    typer.Option(
        "--scheme", help="Naming of the base: auto, hf-clip-vit, openclip-vit, openclip-visual, plain."
    ),
]
TaskName = Annotated[str, typer.Argument(help="A known task, a directory of your own, or a card.toml.")]
DataRoot = Annotated[
    Path | None, typer.Option("--data", help="Directory of known data sets; default $ANISO_DATA or ./data.")
]
SplitSeed = Annotated[int, typer.Option("--split-seed", help="Seed of splits that a data set does not have.")]
OnBadImage = Annotated[
    str, typer.Option("--on-bad-image", help="error, skip, or the largest number to skip.")
]
Workers = Annotated[int, typer.Option(help="Processes that decode images.", min=0)]
Device = Annotated[str | None, typer.Option("--device", help="Device; default: the GPU if there is one.")]
Activation = Annotated[
    str | None, typer.Option("--activation", help="The base's activation, if its files do not name it.")
]


def bad_images(text: str) -> OnBad:
    """Return what to do about images that cannot be decoded."""
    if text == "error":
        return "error"
    if text == "skip":
        return "skip"
    if text.isdecimal():
        return int(text)
    raise UsageError(
        "USAGE",
        f"invalid value '{printable(text)}' for --on-bad-image: choose error, skip or a number",
        fix="--on-bad-image skip",
    )


def open_bank(name: str | Path, base: Ref | None = None) -> BankType:
    """Open a bank: a directory, a bundled one by name, or random:N over a base."""
    checks.existing_bank(name)
    from aniso.experiments.banks import open_bank

    return open_bank(name, base)


def base_files(name: str) -> Ref:
    """Return the weights of a base: a path, mini, or open_clip's NAME:TAG such as ViT-B-32:openai."""
    from aniso.models import base_weights

    return base_weights(name)


def dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype with a short name such as fp16."""
    if name is None:
        return None
    checks.one_of("--dtype", name, checks.DTYPES)
    from aniso.vectors.convert import DTYPES

    return DTYPES[name]


def renames(pairs: list[str] | None) -> dict[str, str]:
    out = {}
    for pair in pairs or ():
        old, equals, new = pair.partition("=")
        if not (old and equals and new):
            raise UsageError(
                "USAGE",
                f"invalid value '{printable(pair)}' for --rename: write OLD=NEW",
                fix="--rename OLD=NEW",
            )
        out[old] = new
    return out


def named_files(items: list[str]) -> dict[str, str]:
    """Parse ``NAME=FILE`` or ``FILE``, whose name is that of the file."""
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
