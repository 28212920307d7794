"""``aniso vector``: make, show, cosine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aniso.cli import checks, options, show

if TYPE_CHECKING:
    from aniso.vectors import TaskVector

app = typer.Typer(help="Single task vectors.", no_args_is_help=True)


@app.command()
def make(
    tuned: Annotated[str, typer.Argument(help="The fine-tuned model or LoRA adapter, or its run.")],
    base: options.Base,
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write.")],
    storage: options.Storage = "fp32",
    scheme: options.Scheme = "auto",
    activation: options.Activation = None,
    skip_key: options.SkipKey = None,
    rename: options.Rename = None,
    allow_distant: options.AllowDistant = False,
    overwrite: options.Overwrite = False,
    json: show.Json = False,
) -> None:
    """Make a task vector: fine-tuned weights minus base weights."""
    checks.known_storage(storage)
    options.renames(rename)
    for ref in (tuned, base):
        checks.existing_weights(ref)
    from aniso.experiments.run_files import weights_of
    from aniso.vectors import BlockSource, KeyEdits, TaskVector
    from aniso.weights import open_weights

    source = open_weights(weights_of(tuned))
    blocks = BlockSource(open_weights(options.base_files(base)), scheme=scheme, activation=activation)
    dense = 4 * sum(block.numel for block in blocks.layout.blocks)
    with show.progress("comparing", source.nbytes + 2 * dense) as advance:
        vector = TaskVector.between(
            blocks,
            source,
            edits=KeyEdits(tuple(skip_key or ()), options.renames(rename)),
            allow_distant=allow_distant,
            progress=advance,
        )
        sha256 = vector.save(out, storage=storage, overwrite=overwrite, progress=advance)
    made = TaskVector.load(out)
    if json:
        show.as_json({**_summary(made), "out": str(out), "sha256": sha256})
        return
    show.notes(vector.notes)
    show.line(
        f"wrote {out}: {len(made.blocks)} of {len(made.layout.blocks)} blocks, norm {made.norm():.4g}, "
        f"{show.size(out.stat().st_size)}, relative error {made.relative_error:.2g}"
    )


@app.command(name="show")
def show_(
    file: Annotated[Path, typer.Argument(help="A vector made by 'vector make'.")],
    json: show.Json = False,
) -> None:
    """Show a vector block by block."""
    checks.existing_file(file)
    from aniso.vectors import TaskVector

    vector = TaskVector.load(file)
    if json:
        show.as_json(_summary(vector))
        return
    show.notes(vector.notes)
    base = vector.base
    show.line(f"{vector.name} over {base.label} ({base.content[:12]}), norm {vector.norm():.4g}")
    rows = []
    for block in vector.layout.blocks:
        norm, base_norm = vector.norms.get(block.name), base.norms.get(block.name)
        share = f"{norm / base_norm:.2%}" if norm and base_norm else ""
        rows.append((block.name, block.kind.value, block.shape, "absent" if norm is None else norm, share))
    show.table(("block", "kind", "shape", "norm", "of base"), rows)


@app.command()
def cosine(
    files: Annotated[list[Path], typer.Argument(help="Vectors and banks.")],
    json: show.Json = False,
) -> None:
    """Show the cosine similarity of every pair of vectors."""
    for path in files:
        checks.existing_file(path)
    from aniso.vectors import Bank, TaskVector

    vectors: list[TaskVector] = []
    for file in files:
        bank = Bank.load(file) if file.is_dir() else None
        vectors += [bank[name] for name in bank] if bank else [TaskVector.load(file)]
    names = [vector.name for vector in vectors]
    matrix = [[1.0 for _ in vectors] for _ in vectors]
    pairs = [(i, j) for i in range(len(vectors)) for j in range(i)]
    with show.progress("comparing", len(pairs)) as advance:
        for i, j in pairs:
            matrix[i][j] = matrix[j][i] = vectors[i].cosine(vectors[j])
            advance(1)
    if json:
        show.as_json({"names": names, "cosine": matrix})
        return
    rows = [(name, *(f"{c:.3f}" for c in row)) for name, row in zip(names, matrix, strict=True)]
    show.table(("", *names), rows)


def _summary(vector: TaskVector) -> dict[str, object]:
    from dataclasses import asdict

    base = vector.base
    return {
        "name": vector.name,
        "base": {"label": base.label, "fingerprint": base.content, "activation": base.activation},
        "norm": vector.norm(),
        "relative_error": vector.relative_error,
        "origin": asdict(vector.provenance),
        "blocks": {b.name: vector.norms.get(b.name) for b in vector.layout.blocks},
    }
