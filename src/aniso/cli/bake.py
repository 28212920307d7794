"""``aniso bake``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aniso.cli import checks, options, show
from aniso.errors import UsageError

if TYPE_CHECKING:
    from aniso.compose import Baked, CardDetails, Coefficients
    from aniso.learn.heads import SavedHead
    from aniso.vectors import Bank

_HEAD = "head.safetensors"


def bake(
    coefficients: Annotated[Path, typer.Argument(help="The directory of a run, or a file of coefficients.")],
    bank: options.Bank,
    base: options.Base,
    out: Annotated[Path, typer.Option("-o", "--out", help="File, or directory with --to.")],
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
        typer.Option(
            "--head", help="A head learned on this composition, saved beside it; default: that of the run."
        ),
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
    """Write base + sum of coefficient * task vector as an ordinary checkpoint."""
    _require_options(to, rank or pad_rank, head or dtype or activation, task)
    checks.one_of("--dtype", dtype, checks.DTYPES)
    checks.hub_id("--base-model", base_model)
    for path in (coefficients, head):
        checks.existing_file(path)
    checks.existing_bank(bank)
    checks.existing_weights(base)
    from aniso.compose import Baked, CardDetails
    from aniso.experiments.banks import load_coefficients
    from aniso.experiments.class_lists import classes_beside
    from aniso.experiments.run_files import COEFFICIENTS, file_of, record_beside

    file = file_of(coefficients, COEFFICIENTS)
    opened, made = load_coefficients(options.open_bank(bank, options.base_files(base)), file)
    details = CardDetails(record_beside(file), show.this_command(), licence, base_model)
    if to == "peft":
        _bake_adapter(made, opened, base, out, (rank, pad_rank), details, overwrite, json)
        return
    baked = Baked(options.base_files(base), opened, made, dtype=options.dtype(dtype))
    if head is None and task is None:
        head = _head_of_run(coefficients)
    if to == "onnx":
        _bake_onnx(baked, made, opened, base, out, (head, task, data), details, overwrite, json)
        return
    beside = out.with_name(f"{out.stem}.{_HEAD}")  # for a checkpoint that is one file
    if head is not None and to == "safetensors" and beside.exists() and not overwrite:
        raise UsageError("OUT-EXISTS", f"'{beside}' exists", fix="add --overwrite to replace it")
    also = classes_beside(coefficients) if to != "safetensors" else {}
    if head is not None:
        also[_HEAD] = _head_of_checkpoint(head, made, opened, baked)
    with show.progress("baking", baked.nbytes) as advance:
        notes = baked.save(
            out,
            to=to,
            activation=activation,
            details=details,
            also=also,
            overwrite=overwrite,
            progress=advance,
        )
    if head is not None and to == "safetensors":
        _write(beside, also[_HEAD][0], overwrite)
    if json:
        show.as_json({"out": str(out), "to": to, "coefficients": len(made), "notes": list(notes)})
        return
    show.notes(notes)
    show.line(f"wrote {out}: {len(made.vectors)} vectors over {made.provenance.base.label}, {made.partition}")
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


def _head_of_run(path: Path) -> Path | None:
    return path / _HEAD if path.is_dir() and (path / _HEAD).is_file() else None


def _bake_adapter(
    made: Coefficients,
    bank: Bank,
    base: str,
    out: Path,
    ranks: tuple[int | None, int | None],
    details: CardDetails,
    overwrite: bool,
    json: bool,
) -> None:
    from aniso.compose import merge_adapters

    rank, pad_rank = ranks
    total = sum(4 * entry.block.numel for entry in made.index.blocks)
    with show.progress("composing", total) as advance:
        adapter = merge_adapters(options.base_files(base), bank, made, rank=rank, progress=advance)
    adapter = adapter if pad_rank is None else adapter.padded(pad_rank)
    adapter.save(out, details=details, overwrite=overwrite)
    found = adapter.ranks.values()
    if json:
        facts = {"layers": len(adapter.ranks), "ranks": adapter.ranks, "error": adapter.error}
        show.as_json({"out": str(out), "to": "peft", "coefficients": len(made), **facts})
        return
    lost = f", relative error {adapter.error:.2%}" if rank is not None else ", exact"
    show.line(f"wrote {out}: {len(found)} layers, ranks {min(found)} to {max(found)}{lost}")


def _bake_onnx(
    baked: Baked,
    made: Coefficients,
    bank: Bank,
    base: str,
    out: Path,
    classifier: tuple[Path | None, str | None, Path | None],
    details: CardDetails,
    overwrite: bool,
    json: bool,
) -> None:
    from aniso.data import load_task
    from aniso.learn.onnx_export import require_onnx, save_onnx
    from aniso.models import load_composed

    head, task, data = classifier
    if (head is None) == (task is None):
        raise UsageError("USAGE", "--to onnx needs --head or --task, and only one of them", fix="--task TASK")
    require_onnx()
    encoder = load_composed(base, baked)
    found = encoder.class_weights(load_task(task, data).classes) if task is not None else None
    own = found if head is None else _checked_head(head, made, bank).head
    assert own is not None
    error = save_onnx(encoder, own, out, also=baked.card_files("onnx", details), overwrite=overwrite)
    if json:
        show.as_json({"out": str(out), "to": "onnx", "classes": list(own.names), "error": error})
        return
    show.line(f"wrote {out}: {len(own.names)} classes; onnxruntime's logits differ by at most {error:.1e}")


def _checked_head(path: Path, made: Coefficients, bank: Bank) -> SavedHead:
    """Return a head in a file or a run; raises unless it was learned on this composition."""
    from aniso.experiments.run_files import HEAD, file_of
    from aniso.learn.features import composed_identity
    from aniso.learn.heads import load_head

    saved = load_head(file_of(path, HEAD))
    known = composed_identity(made.provenance.base.content, made.chosen(bank), made)
    saved.require_features(known, str(path))
    return saved


def _head_of_checkpoint(path: Path, made: Coefficients, bank: Bank, baked: Baked) -> tuple[bytes, str]:
    """Return a composition's head as one of the baked checkpoint, and a sentence for its model card."""
    from aniso.vectors import BlockSource

    saved = _checked_head(path, made, bank)
    content = saved.head.to_bytes({"model": BlockSource(baked).identity().content})
    sentence = f"is a classifier for {len(saved.head.names)} classes on these features ({saved.head.kind})."
    return content, sentence


def _write(path: Path, content: bytes, overwrite: bool) -> None:
    from aniso.weights.atomic import atomic_file

    with atomic_file(path, overwrite=overwrite) as file:
        file.stream.write(content)
