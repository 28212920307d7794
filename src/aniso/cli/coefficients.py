"""``aniso coefficients``: make, show."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aniso.cli import analysis_output, checks, options, show
from aniso.errors import UsageError, printable

if TYPE_CHECKING:
    from aniso.compose import Coefficients

app = typer.Typer(help="Coefficients: one number per task vector, block and part.", no_args_is_help=True)


@app.command()
def make(
    bank: options.Bank,
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write.")],
    values: Annotated[
        list[str] | None,
        typer.Argument(
            help="VECTOR=NUMBER, for example cars=0.4 mnist=-1, or VECTOR/BLOCKS=NUMBER for its blocks whose "
            "names match a pattern: 'cars/*.attn.*=0.2'. Later ones win."
        ),
    ] = None,
    values_file: Annotated[
        str | None,
        typer.Option("--values", help="Read them from a file, one per line; - is standard input."),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option("--from", help="Change these coefficients, a file or a run; default: zero."),
    ] = None,
    mergekit: Annotated[
        Path | None, typer.Option("--mergekit", help="Take the weights of a mergekit file instead.")
    ] = None,
    vector: Annotated[
        list[str] | None,
        typer.Option("--vector", help="VECTOR=MODEL: the vector of a model of that file; repeatable."),
    ] = None,
    overwrite: options.Overwrite = False,
    json: show.Json = False,
) -> None:
    """Write coefficients by hand, for vectors or blocks, or from the weights of a mergekit file."""
    by_hand = bool(values) or values_file is not None or start is not None
    if by_hand == (mergekit is not None):
        raise UsageError("USAGE", "give VECTOR=NUMBER or --mergekit, and only one of them", fix="cars=0.4")
    if vector and mergekit is None:
        raise UsageError("USAGE", "--vector applies to --mergekit only", fix="leave out --vector")
    if mergekit is not None:
        _make_from_mergekit(mergekit, bank, _pairs(vector), out, overwrite, json)
        return
    from aniso.assignment_text import parse_assignments

    assignments = parse_assignments([*_lines(values_file), *(values or ())])
    checks.existing_file(start)
    checks.existing_bank(bank)
    from aniso.experiments.assignments import assigned_coefficients
    from aniso.experiments.banks import load_coefficients

    opened, given = options.open_bank(bank), None
    if start is not None:
        opened, given = load_coefficients(opened, start)
    made = assigned_coefficients(opened, assignments, given)
    made.save(out, overwrite=overwrite)
    _report(made, json)


def _lines(name: str | None) -> list[str]:
    """Assignments in a file, or on standard input."""
    from aniso.assignment_text import assignment_lines

    if name is None:
        return []
    if name == "-":
        return assignment_lines(sys.stdin, "standard input")
    checks.existing_file(Path(name))
    with Path(name).open(encoding="utf-8", errors="replace") as file:
        return assignment_lines(file, name)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="A file of coefficients, or the directory of a run.")],
    to: Annotated[str, typer.Option("--to", help="mergekit: weights for task arithmetic.")] = "mergekit",
    vector: Annotated[
        list[str] | None,
        typer.Option("--vector", help="VECTOR=MODEL: directory or hub id of a vector's model; repeatable."),
    ] = None,
    base: Annotated[str | None, typer.Option("--base", help="Directory or hub id of the base.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="File; default: print it.")] = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Write coefficients as a configuration of another program: mergekit."""
    checks.one_of("--to", to, ("mergekit",))
    checks.existing_file(file)
    models = {name: model for model, name in _pairs(vector).items()}
    from aniso.compose import Coefficients
    from aniso.experiments.mergekit import export_mergekit
    from aniso.experiments.run_files import COEFFICIENTS
    from aniso.weights.atomic import write_text

    text = export_mergekit(Coefficients.load(file / COEFFICIENTS if file.is_dir() else file), models, base)
    if out is None:
        show.text(text)
    else:
        write_text(out, text, overwrite=overwrite)
        show.line(f"wrote {out}")


def _make_from_mergekit(
    file: Path, bank: Path, names: dict[str, str], out: Path, overwrite: bool, json: bool
) -> None:
    checks.existing_file(file)
    checks.existing_bank(bank)
    from aniso.experiments.mergekit import import_mergekit

    found = import_mergekit(file, options.open_bank(bank), names)
    show.notes(found.notes)
    found.coefficients.save(out, overwrite=overwrite)
    _report(found.coefficients, json)


def _pairs(given: list[str] | None) -> dict[str, str]:
    """Vectors by model, from VECTOR=MODEL."""
    out = {}
    for item in given or ():
        name, equals, model = item.partition("=")
        if not (name and equals and model):
            raise UsageError(
                "USAGE", f"invalid value '{printable(item)}' for --vector", fix="--vector VECTOR=MODEL"
            )
        out[model] = name
    return out


@app.command("show")
def show_(
    file: Annotated[Path, typer.Argument(help="A file of coefficients, or the directory of a run.")],
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw a heat map: FILE.png or FILE.svg.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing figure.")] = False,
    json: show.Json = False,
) -> None:
    """Show the base and bank of a file of coefficients, and statistics of every vector."""
    checks.existing_file(file)
    analysis_output.require_figure(figure, overwrite)
    from aniso.compose import Coefficients
    from aniso.experiments.run_files import COEFFICIENTS, file_of

    found = Coefficients.load(file_of(file, COEFFICIENTS))
    if figure is not None:
        _draw(found, figure, overwrite)
    _report(found, json)
    if figure is not None and not json:
        show.line(f"wrote {figure}")


def _draw(found: Coefficients, figure: Path, overwrite: bool) -> None:
    from aniso.report.figures import block_label, heat_map

    columns = [block_label(block) for block in found.block_labels]
    matrix = found.matrix().tolist()
    analysis_output.write_figure(
        figure, overwrite, lambda kind: heat_map(matrix, found.vectors, columns, kind=kind)
    )


def _report(made: Coefficients, json: bool) -> None:
    matrix, components = made.matrix(), _components(made)
    if json:
        cells = matrix.tolist()
        show.as_json(
            {
                "partition": made.partition.as_dict(),
                "count": len(made),
                "base": {"label": made.provenance.base.label, "content": made.provenance.base.content},
                "bank": made.provenance.bank,
                "selection": made.selection or None,
                "vectors": list(made.vectors),
                "blocks": list(made.blocks),
                # absent cells are null: NaN is no JSON
                "matrix": [[None if x != x else x for x in row] for row in cells],
                **({"components": components} if components else {}),
            }
        )
        return
    show.line(f"{len(made):,} coefficients: {made.partition}")
    base = made.provenance.base
    show.line(f"base {base.label} {base.content[:16]}, bank {made.provenance.bank[:16]}")
    if made.selection:
        show.line(f"vectors selected by {printable(made.selection)}")
    rows = []
    for name, row in zip(made.vectors, matrix, strict=True):
        known = row[~row.isnan()]
        numbers = [float(x) for x in (known.mean(), known.min(), known.max())] if len(known) else [0.0] * 3
        rows.append((name, len(known), *numbers))
    show.table(("vector", "blocks", "mean", "min", "max"), rows)
    if components:
        heads = [name.replace("_", " ") for name in components[0]]
        show.table(heads, [tuple(row.values()) for row in components])


def _components(made: Coefficients) -> list[dict[str, float]]:
    """Statistics of each singular component over vectors and matrices, if coefficients are of components."""
    from aniso.learn.analysis import by_component

    return [
        {
            "component": int(number),
            "mean": float(own.mean()),
            "mean_size": float(own.abs().mean()),
            "min": float(own.min()),
            "max": float(own.max()),
        }
        for number, own in by_component(made).items()
    ]
