"""``aniso convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aniso.cli import checks, options, show


def convert(
    ref: Annotated[str, typer.Argument(help="A file, a directory, or a hub id.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="File, or directory with --to.")],
    to: Annotated[str, typer.Option(help="safetensors, open_clip or huggingface.")] = "safetensors",
    dtype: Annotated[str | None, typer.Option(help="fp32, fp16 or bf16; default the source's.")] = None,
    activation: Annotated[
        str | None, typer.Option(help="quick_gelu or gelu, if the source does not name it.")
    ] = None,
    skip_key: Annotated[list[str] | None, typer.Option(help="Leave out keys that match.")] = None,
    tensors_only: Annotated[
        bool, typer.Option("--tensors-only", help="Extract tensors from a pickle that would call functions.")
    ] = False,
    overwrite: options.Overwrite = False,
    json: show.Json = False,
) -> None:
    """Rewrite a checkpoint as safetensors, or between open_clip's and Hugging Face's names."""
    checks.one_of("--to", to, checks.CHECKPOINTS)
    checks.one_of("--dtype", dtype, checks.DTYPES)
    checks.existing_weights(ref)
    from aniso.experiments.run_files import weights_of
    from aniso.models.exported_files import ExportedFiles, exported_files
    from aniso.vectors import KeyEdits
    from aniso.vectors.convert import Extras
    from aniso.vectors.convert import convert as run
    from aniso.weights import open_weights

    source = open_weights(weights_of(ref), tensors_only=tensors_only)
    edits = KeyEdits(tuple(skip_key or ()))
    edits.require_used([source])
    source = edits.applied(source)
    beside = ExportedFiles() if to == "safetensors" else exported_files(source, to)
    with show.progress("converting", source.nbytes) as advance:
        notes = run(
            source,
            out,
            to=to,
            dtype=dtype,
            activation=activation,
            overwrite=overwrite,
            progress=advance,
            extras=Extras(files=beside.files, config=beside.config),
        )
    notes = (*notes, *beside.notes)
    if json:
        show.as_json({"out": str(out), "to": to, "notes": list(notes)})
        return
    show.notes(notes)
    show.line(f"wrote {out}")
