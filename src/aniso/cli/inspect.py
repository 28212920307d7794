"""``aniso inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from aniso.cli import checks, show
from aniso.cli.bank import ls as show_bank
from aniso.cli.vector import show_ as show_vector


def inspect(
    ref: Annotated[str, typer.Argument(help="A file, a directory, or a hub id owner/name[@revision].")],
    keys: Annotated[bool, typer.Option("--keys", help="List all tensors instead of blocks.")] = False,
    hashes: Annotated[bool, typer.Option("--hash", help="Read all data, check and hash it.")] = False,
    allow_nonfinite: Annotated[
        bool,
        typer.Option(
            "--allow-nonfinite", help="With --hash: list tensors with NaN or infinity, do not stop."
        ),
    ] = False,
    json: show.Json = False,
) -> None:
    """Show the tensors and blocks of a file, without running anything in it.

    Exit code 4 if it is a pickle that would have called functions: they are listed, and none is called.
    """
    checks.existing_weights(ref)
    from aniso.vectors.summary import summarise_source
    from aniso.vectors.task_vector import stored_vector
    from aniso.weights import open_weights
    from aniso.weights.torch_file import calls_error

    if (Path(ref) / "vectors-000.safetensors").is_file():
        show_bank(Path(ref), json)
        return
    # the calls of a pickle are what one inspects it for: they are shown, then it is refused
    source = open_weights(ref, tensors_only=True)
    if stored_vector(source):
        show_vector(Path(ref), json)
        return
    with show.progress("reading", source.nbytes if hashes else 0) as advance:
        survey = summarise_source(source, hashes=hashes, allow_nonfinite=allow_nonfinite, progress=advance)
    if json:
        show.as_json(survey.to_json())
    else:
        _show(survey, keys, hashes)
    if source.info.pickle and source.info.pickle.calls:
        raise calls_error(source.label, source.info.pickle)


def _show(survey: Any, keys: bool, hashes: bool) -> None:
    show.notes(survey.notes)
    _summary(survey)
    if keys:
        show.table(
            ("tensor", "dtype", "shape", *(["sha256"] if hashes else [])),
            [(t.name, t.dtype, t.shape, *([t.sha256[:12]] if hashes else [])) for t in survey.tensors],
        )
    else:
        show.table(
            ("block", "kind", "depth", "shape", "tensors"),
            [(b.name, b.kind.value, b.depth, b.shape, len(b.parts)) for b in survey.layout.blocks],
        )


def _summary(survey: Any) -> None:
    show.line(f"{survey.label}: {survey.format}, {show.size(survey.nbytes)}, {len(survey.tensors)} tensors")
    show.line(f"naming {survey.layout.scheme}: {len(survey.layout.blocks)} blocks, {survey.outside} outside")
    if survey.sha256:
        show.line(f"sha256 {survey.sha256}")
    if survey.fingerprint:
        show.line(f"fingerprint {survey.fingerprint}")
    for name in survey.calls:
        show.line(f"would have called: {name}")
