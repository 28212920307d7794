"""``aniso bank``: build, add, ls, check, features, quantise, plan; ``merge`` is in a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aniso.cli import checks, merge, options, show

if TYPE_CHECKING:
    from aniso.vectors import Bank, BlockSource
    from aniso.weights import WeightSource

app = typer.Typer(help="Banks: task vectors over one base, in one directory.", no_args_is_help=True)

Tuned = Annotated[
    list[str], typer.Argument(help="NAME=FILE or FILE: fine-tuned models, LoRA adapters and runs.")
]
Directory = Annotated[Path, typer.Argument(help="A bank.")]

app.command("merge")(merge.merge)


@app.command()
def build(
    tuned: Tuned,
    base: options.Base,
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory to write.")],
    storage: options.Storage = "fp32",
    scheme: options.Scheme = "auto",
    activation: options.Activation = None,
    skip_key: options.SkipKey = None,
    rename: options.Rename = None,
    allow_distant: options.AllowDistant = False,
    overwrite: options.Overwrite = False,
    json: show.Json = False,
) -> None:
    """Build a bank from a base and models fine-tuned from it."""
    _require_inputs(base, tuned, storage, rename)
    from aniso.vectors import Bank, KeyEdits
    from aniso.vectors.licences import keep_licences

    blocks, sources, total = _opened(base, tuned, scheme, activation)
    with show.progress("building", total) as advance:
        bank = Bank.build(
            blocks,
            sources,
            to=out,
            storage=storage,
            overwrite=overwrite,
            edits=KeyEdits(tuple(skip_key or ()), options.renames(rename)),
            allow_distant=allow_distant,
            progress=advance,
        )
    _report(keep_licences(bank, sources), json)


@app.command()
def add(
    directory: Directory,
    tuned: Tuned,
    base: options.Base,
    storage: Annotated[str | None, typer.Option(help="Default: that of the bank.")] = None,
    scheme: options.Scheme = "auto",
    activation: options.Activation = None,
    skip_key: options.SkipKey = None,
    rename: options.Rename = None,
    allow_distant: options.AllowDistant = False,
    json: show.Json = False,
) -> None:
    """Add vectors to a bank."""
    checks.existing_bank(directory)
    _require_inputs(base, tuned, storage, rename)
    from aniso.vectors import KeyEdits
    from aniso.vectors.licences import keep_licences

    bank = options.open_bank(directory)
    blocks, sources, total = _opened(base, tuned, scheme, activation)
    with show.progress("adding", 2 * total) as advance:
        bank = bank.add(
            blocks,
            sources,
            storage=storage,
            edits=KeyEdits(tuple(skip_key or ()), options.renames(rename)),
            allow_distant=allow_distant,
            progress=advance,
        )
    _report(keep_licences(bank, sources), json)


@app.command()
def ls(directory: Directory, json: show.Json = False) -> None:
    """List a bank's vectors."""
    _report(options.open_bank(directory), json, notes=False)


@app.command()
def plan(
    directory: Directory,
    partition: Annotated[
        str,
        typer.Option(help="whole, blocks, rows, columns, random:K, components:K; @weight: weights only."),
    ] = "blocks",
    memory: Annotated[
        str | None, typer.Option(help="Memory limit, such as 8GiB; default: most of what is free.")
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Read vectors from disk as needed.")] = False,
    json: show.Json = False,
) -> None:
    """Show the memory that composing with a bank would take, before anything large is read."""
    checks.existing_bank(directory)
    import torch

    from aniso.compose import CoefficientIndex, Partition, Plan, Runtime

    bank = options.open_bank(directory)
    index = CoefficientIndex.of(bank, Partition.parse(partition))
    made = Plan.of(bank, index, Runtime(memory=memory, stream=stream), torch.device("cpu"))
    if json:
        show.as_json({**made.as_dict(), "notes": list(index.notes)})
        return
    show.notes(index.notes)
    for text in str(made).splitlines():
        show.line(text)


@app.command()
def check(directory: Directory, json: show.Json = False) -> None:
    """Read a whole bank and compare it with its checksums."""
    bank = options.open_bank(directory)
    total = sum(record.nbytes for record in bank.manifest.files) if bank.manifest else 0
    with show.progress("checking", 2 * total) as advance:  # hashed, then read block by block
        notes = bank.check(advance)
    if json:
        show.as_json({"ok": True, "vectors": list(bank), "notes": notes})
        return
    show.notes(notes)
    show.line(f"{directory}: {len(bank)} vectors, {len(bank.layout.blocks)} blocks, all checksums match")


@app.command()
def features(
    directory: Directory,
    model: Annotated[str, typer.Option(help="The bank's base.")],
    task: Annotated[list[str], typer.Option(help="NAME=TASK: the task of vector NAME; or TASK.")],
    split: Annotated[str, typer.Option(help="The split to average over.")] = "train",
    weights: Annotated[
        str | None, typer.Option(help="Weights of the model, if its name does not imply them.")
    ] = None,
    data: options.DataRoot = None,
    workers: options.Workers = 0,
    json: show.Json = False,
) -> None:
    """Store the mean features of a bank's tasks, which `aniso select --strategy features` compares with."""
    checks.existing_bank(directory)
    for item in task:
        checks.existing_task(item.rpartition("=")[2])
    from aniso.data import load_task
    from aniso.learn.selection import mean_feature
    from aniso.models import load_model

    bank, encoder = options.open_bank(directory), load_model(model, weights)
    bank.over(encoder.weight_source())
    found = {}
    for item in task:
        name, _, ref = item.rpartition("=")
        with show.item_progress() as progress:
            own = load_task(ref, data, progress=progress)
            found[name or own.name] = mean_feature(
                encoder, own.split(split), workers=workers, progress=progress
            )
        show.notes(f"{own.name}: {note}" for note in own.notes)
    known = bank.with_features(found).features
    if json:
        show.as_json(
            {"path": str(bank.path), "features": {name: row.tolist() for name, row in known.items()}}
        )
        return
    show.line(f"{directory}: mean features of {len(known)} of {len(bank)} vectors")


@app.command()
def quantise(
    directory: Directory,
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory to write.")],
    storage: options.Storage = "int8",
    overwrite: options.Overwrite = False,
    json: show.Json = False,
) -> None:
    """Write a bank in another storage, and show the precision lost."""
    checks.existing_bank(directory)
    checks.known_storage(storage)
    bank = options.open_bank(directory)
    total = 4 * len(bank) * sum(block.numel for block in bank.layout.blocks)
    with show.progress("packing", total) as advance:
        packed = bank.save(out, storage=storage, overwrite=overwrite, progress=advance)
    _report(packed, json, notes=False)


def _gain(facts: Any) -> str:
    """Return the task's accuracy before and after fine-tuning, where the bank records it."""
    before, after = facts.get("zero_shot"), facts.get("tuned")
    return f"{before:.1%} to {after:.1%}" if isinstance(before, float) and isinstance(after, float) else ""


def _require_inputs(base: str, tuned: list[str], storage: str | None, rename: list[str] | None) -> None:
    """Check arguments before torch is imported."""
    checks.known_storage(storage)
    options.renames(rename)
    for ref in (base, *options.named_files(tuned).values()):
        checks.existing_weights(ref)


def _opened(
    base: str, tuned: list[str], scheme: str, activation: str | None
) -> tuple[BlockSource, dict[str, WeightSource], int]:
    from aniso.experiments.run_files import weights_of
    from aniso.vectors import BlockSource
    from aniso.weights import open_weights

    blocks = BlockSource(open_weights(options.base_files(base)), scheme=scheme, activation=activation)
    named = options.named_files(tuned)
    sources = {name: open_weights(weights_of(ref)) for name, ref in named.items()}
    dense = 4 * sum(block.numel for block in blocks.layout.blocks)
    return blocks, sources, sum(source.nbytes for source in sources.values()) + len(sources) * dense


def _report(bank: Bank, json: bool, *, notes: bool = True) -> None:
    rows = []
    for name in bank:
        vector = bank[name]
        rows.append(
            {
                "name": name,
                "from": vector.provenance.source,
                "format": vector.provenance.format,
                "blocks": len(vector.blocks),
                "norm": vector.norm(),
                "relative_error": vector.relative_error,
                "storage": bank.storage_of(name),
                "sha256": vector.provenance.sha256,
                "facts": dict(bank.facts[name]),
            }
        )
    nbytes = sum(record.nbytes for record in bank.manifest.files) if bank.manifest else 0
    if json:
        base = bank.base
        show.as_json(
            {
                "path": str(bank.path),
                "base": {"label": base.label, "fingerprint": base.content, "activation": base.activation},
                "naming": bank.layout.scheme,
                "blocks": len(bank.layout.blocks),
                "storage": bank.storage,
                "bytes": nbytes,
                "content_hash": bank.content_hash,
                "vectors": rows,
                "notes": bank.notes,
            }
        )
        return
    if notes:
        show.notes(bank.notes)
    known = any(bank.facts.values())
    show.table(
        ("vector", "from", "format", "blocks", "norm", "storage", "error", *(("accuracy",) if known else ())),
        [
            (r["name"], r["from"], r["format"], f"{r['blocks']}/{len(bank.layout.blocks)}", r["norm"],
             r["storage"], f"{r['relative_error']:.2%}", *((_gain(r["facts"]),) if known else ()))
            for r in rows
        ],
    )  # fmt: skip
    show.line(
        f"{bank.path}: content {bank.content_hash[:16]}, "
        f"base {bank.base.label} {bank.base.content[:16]}, {bank.layout.scheme}, "
        f"{len(bank.layout.blocks)} blocks, {bank.storage}, {show.size(nbytes)} "
        f"({show.size(nbytes / len(bank))} per vector)"
    )
