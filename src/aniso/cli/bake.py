"""``aniso bake``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aniso.cli import checks, options, show
from aniso.errors import UsageError

if TYPE_CHECKING:
    from aniso.compose import CardDetails
    from aniso.experiments.baking import BakeSource

_HEAD = "head.safetensors"


def bake(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The directory of a run, or a file of coefficients.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="File, or directory with --to.")],
    bank: Annotated[
        Path | None, typer.Option("--bank", help="The bank: a directory, or mini; default: the run's.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            help="A file, a directory, a hub id, NAME:TAG of open_clip, or mini; default: the run's.",
        ),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            help="safetensors, open_clip, huggingface, sentence-transformers or dual-encoder; peft for an "
            "adapter; onnx for an image classifier, with --head or --task."
        ),
    ] = "safetensors",
    rank: Annotated[int | None, typer.Option(help="With --to peft: maximal rank; default all.")] = None,
    pad_rank: Annotated[
        int | None,
        typer.Option(help="With --to peft: one rank for all layers, padded with zeros, to hot-swap.", min=1),
    ] = None,
    head: Annotated[
        Path | None,
        typer.Option("--head", help="A head learned on this model, saved beside it; default: the run's."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of composed weights: fp32, fp16 or bf16; default the base's.")
    ] = None,
    activation: options.Activation = None,
    task: Annotated[
        str | None, typer.Option(help="With --to onnx, without a head: the task whose classes are predicted.")
    ] = None,
    data: options.DataRoot = None,
    licence: Annotated[
        str | None,
        typer.Option("--license", help="For the card; default: what base and vectors state, if they agree."),
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="For the card: the base's id on the hub, OWNER/NAME.")
    ] = None,
    overwrite: options.Overwrite = False,
    json: show.Json = False,
) -> None:
    """Write a run's model, such as base + sum of coefficient * task vector, as an ordinary checkpoint."""
    _require_options(to, rank or pad_rank, head or dtype or activation, task)
    checks.one_of("--dtype", dtype, checks.DTYPES)
    checks.hub_id("--base-model", base_model)
    for path in (run, head):
        checks.existing_file(path)
    if bank is not None:
        checks.existing_bank(bank)
    if base is not None:
        checks.existing_weights(base)
    from aniso.compose import CardDetails
    from aniso.experiments.baking import bake_source
    from aniso.experiments.run_files import HEAD, file_of

    source = bake_source(run, base=base, bank=bank, dtype=options.dtype(dtype))
    details = CardDetails(source.record, show.this_command(), licence, base_model)
    target = _Target(out, details, overwrite, json)
    if to == "peft":
        _bake_adapter(source, (rank, pad_rank), target)
        return
    chosen = file_of(head, HEAD) if head is not None else source.head if task is None else None
    if to == "onnx":
        _bake_onnx(source, (chosen, task, data), target)
        return
    _bake_model(source, to, activation, chosen, target)


@dataclass(frozen=True)
class _Target:
    """Where a model is written, and what is said of it."""

    out: Path
    details: CardDetails
    overwrite: bool
    json: bool


def _bake_model(
    source: BakeSource, to: str, activation: str | None, head: Path | None, target: _Target
) -> None:
    out = target.out
    beside = out.with_name(f"{out.stem}.{_HEAD}")  # for a checkpoint that is one file
    if head is not None and to == "safetensors" and beside.exists() and not target.overwrite:
        raise UsageError("OUT-EXISTS", f"'{beside}' exists", fix="add --overwrite to replace it")
    source.require_form(to)
    also = source.beside(to) if to != "safetensors" else {}
    if head is not None:
        also[_HEAD] = _head_of_checkpoint(head, source)
    with show.progress("baking", source.model.nbytes) as advance:
        notes = source.model.save(
            out,
            to=to,
            activation=activation,
            details=target.details,
            also=also,
            overwrite=target.overwrite,
            progress=advance,
        )
    if head is not None and to == "safetensors":
        _write(beside, also[_HEAD][0], target.overwrite)
    if target.json:
        made = source.coefficients
        count = 0 if made is None else len(made)
        show.as_json({"out": str(out), "to": to, "coefficients": count, "notes": list(notes)})
        return
    show.notes(notes)
    show.line(f"wrote {out}: {source.label}")
    if head is not None:
        show.line(f"wrote {beside if to == 'safetensors' else out / _HEAD}: use it with aniso eval --head")


def _require_options(to: str, ranks: object, others: object, task: str | None) -> None:
    """Require options that a kind of output has, before torch is imported."""
    checks.one_of("--to", to, checks.BAKED)
    if to == "peft" and others:
        message = "--head, --dtype and --activation are not supported with --to peft"
        raise UsageError("USAGE", message, fix="leave them out")
    if to != "peft" and ranks:
        raise UsageError("USAGE", "--rank and --pad-rank are supported with --to peft only", fix="--to peft")
    if to != "onnx" and task is not None:
        raise UsageError("USAGE", "--task is supported with --to onnx only", fix="leave it out")


def _bake_adapter(source: BakeSource, ranks: tuple[int | None, int | None], target: _Target) -> None:
    from aniso.compose import merge_adapters

    bank, made = source.bank, source.coefficients
    if bank is None or made is None:
        raise UsageError(
            "USAGE",
            "--to peft needs a run with coefficients of adapters",
            found=source.label,
            fix="the directory 'adapter' of a run that trained one is in PEFT's format already",
        )
    rank, pad_rank = ranks
    total = sum(4 * entry.block.numel for entry in made.index.blocks)
    with show.progress("composing", total) as advance:
        adapter = merge_adapters(source.base, bank, made, rank=rank, progress=advance)
    adapter = adapter if pad_rank is None else adapter.padded(pad_rank)
    adapter.save(target.out, details=target.details, overwrite=target.overwrite)
    found = adapter.ranks.values()
    if target.json:
        facts = {"layers": len(adapter.ranks), "ranks": adapter.ranks, "error": adapter.error}
        show.as_json({"out": str(target.out), "to": "peft", "coefficients": len(made), **facts})
        return
    lost = f", relative error {adapter.error:.2%}" if rank is not None else ", exact"
    show.line(f"wrote {target.out}: {len(found)} layers, ranks {min(found)} to {max(found)}{lost}")


def _bake_onnx(
    source: BakeSource, classifier: tuple[Path | None, str | None, Path | None], target: _Target
) -> None:
    from aniso.compose import Baked
    from aniso.data import load_task
    from aniso.learn.onnx_export import require_onnx, save_onnx
    from aniso.models import load_composed

    head, task, data = classifier
    if (head is None) == (task is None):
        raise UsageError("USAGE", "--to onnx needs --head or --task, and only one of them", fix="--task TASK")
    require_onnx()
    weights = source.model if isinstance(source.model, Baked) else source.model.source
    encoder = load_composed(source.text_base, weights)
    found = encoder.class_weights(load_task(task, data).classes) if task is not None else None
    own = found if head is None else source.checked_head(head).head
    assert own is not None
    card = source.model.card_files("onnx", target.details)
    error = save_onnx(encoder, own, target.out, also=card, overwrite=target.overwrite)
    if target.json:
        show.as_json({"out": str(target.out), "to": "onnx", "classes": list(own.names), "error": error})
        return
    show.line(
        f"wrote {target.out}: {len(own.names)} classes; onnxruntime's logits differ by at most {error:.1e}"
    )


def _head_of_checkpoint(path: Path, source: BakeSource) -> tuple[bytes, str]:
    """Return a head as one of the baked checkpoint, and a sentence for its model card."""
    saved = source.checked_head(path)
    content = saved.head.to_bytes({"model": source.content})
    sentence = f"is a classifier for {len(saved.head.names)} classes on these features ({saved.head.kind})."
    return content, sentence


def _write(path: Path, content: bytes, overwrite: bool) -> None:
    from aniso.weights.atomic import atomic_file

    with atomic_file(path, overwrite=overwrite) as file:
        file.stream.write(content)
