"""``aniso inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aniso.cli import checks, options, show
from aniso.cli.bank import ls as show_bank
from aniso.cli.vector import show_ as show_vector

if TYPE_CHECKING:
    from aniso.experiments.inspection import Story


def inspect(
    ref: Annotated[
        str,
        typer.Argument(
            help="A file or directory: weights, a bank, a run, coefficients, a head; a hub id; or mini."
        ),
    ],
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
    """Show what a file or directory holds, without running anything in it.

    Of weights, the tensors and blocks; of what aniso wrote, also what it was made from and learned on.
    Exit code 4 if it is a pickle that would have called functions: they are listed, and none is called.
    """
    checks.existing_weights(ref)
    from aniso.experiments.inspection import story_of
    from aniso.vectors.summary import summarise_source
    from aniso.vectors.task_vector import stored_vector
    from aniso.weights import open_weights
    from aniso.weights.torch_file import calls_error

    if (Path(ref) / "manifest.json").is_file() or _names_a_bank(ref):
        show_bank(Path(ref), json)
        return
    story = story_of(Path(ref))
    if story is not None and not story.is_model:
        _show_story(story, json)
        return
    # the calls of a pickle are what one inspects it for: they are shown, then it is refused
    source = open_weights(options.base_files(ref), tensors_only=True)
    if stored_vector(source):
        show_vector(Path(ref), json)
        return
    with show.progress("reading", source.nbytes if hashes else 0) as advance:
        survey = summarise_source(source, hashes=hashes, allow_nonfinite=allow_nonfinite, progress=advance)
    if json:
        show.as_json(survey.to_json() | ({} if story is None else {"aniso": story.facts}))
    else:
        if story is not None:
            _show_story(story, json)
        _show(survey, keys, hashes)
    if source.info.pickle and source.info.pickle.calls:
        raise calls_error(source.label, source.info.pickle)


def _names_a_bank(ref: str) -> bool:
    """True for a bundled bank that is not also the name of a model, as mini is."""
    from aniso.models.load import MINI
    from aniso.vectors.bundled import list_banks

    return ref != MINI and ref in list_banks() and not Path(ref).exists()


def _show_story(story: Story, json: bool) -> None:
    if json:
        show.as_json(story.facts)
        return
    for text in story.lines:
        show.line(text)


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
