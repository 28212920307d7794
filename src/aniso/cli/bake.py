"""``aniso bake``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aniso.cli import options, show


def bake(
    coefficients: Annotated[Path, typer.Argument(help="A file of coefficients.")],
    bank: options.Bank,
    base: options.Base,
    out: Annotated[Path, typer.Option("-o", "--out", help="File, or directory with --to.")],
    to: Annotated[str, typer.Option(help="safetensors, open_clip or huggingface.")] = "safetensors",
    dtype: Annotated[
        str | None, typer.Option(help="Of composed weights: fp32, fp16 or bf16; the base's by default.")
    ] = None,
    activation: options.Activation = None,
    overwrite: options.Overwrite = False,
    json: show.Json = False,
) -> None:
    """Write base + sum of coefficient * task vector as an ordinary checkpoint."""
    from aniso.compose import Baked, Coefficients

    made = Coefficients.load(coefficients)
    baked = Baked(options.base_files(base), options.open_bank(bank), made, dtype=options.dtype(dtype))
    with show.progress("baking", baked.nbytes) as advance:
        notes = baked.save(
            out,
            to=to,
            activation=activation,
            command=show.this_command(),
            overwrite=overwrite,
            progress=advance,
        )
    if json:
        show.as_json({"out": str(out), "to": to, "coefficients": len(made), "notes": list(notes)})
        return
    show.notes(notes)
    show.line(f"wrote {out}: {len(made.vectors)} vectors over {made.origin.base.label}, {made.partition}")
