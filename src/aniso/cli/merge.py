"""``aniso bank merge``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aniso.cli import checks, options, show
from aniso.errors import UsageError, printable
from aniso.registry import MERGE_RULES

if TYPE_CHECKING:
    from aniso.merge import MergeKeywords, MergeRule
    from aniso.vectors import Bank, TaskVector

_QKV = ("stored", "fused", "split")
_EMBEDDINGS = ("mean", "spectral")
_SMALL = ("error", "mean")
_SPACE = ("auto", "core", "full")
_FORMS = ("paper", "mergekit")


def merge(
    rule: Annotated[str, typer.Argument(help=f"Merge rule: {', '.join(MERGE_RULES.names)}.")],
    bank: options.Bank,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="FILE.safetensors; a bank to add the vector to; a new bank."),
    ] = None,
    vectors: Annotated[str | None, typer.Option(help="Vectors to merge: a,b,c; default all.")] = None,
    scale: Annotated[float | None, typer.Option(help="Factor of the result; default: the rule's.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="NAME=VALUE: an option of the rule; repeatable.")
    ] = None,
    form: Annotated[
        str | None, typer.Option("--as", help="ties and dare: as in the paper, or as mergekit does it.")
    ] = None,
    qkv: Annotated[
        str, typer.Option(help="Query, key and value: stored (as in the bank), fused or split.")
    ] = _QKV[0],
    embeddings: Annotated[
        str, typer.Option(help="What spectral rules do with embeddings: mean, or spectral.")
    ] = _EMBEDDINGS[0],
    small: Annotated[
        str, typer.Option(help="Matrices with fewer ranks than the rule needs: error, or mean.")
    ] = _SMALL[0],
    space: Annotated[
        str, typer.Option(help="Low-rank vectors: core or full space; auto is core for spectral rules.")
    ] = _SPACE[0],
    name: Annotated[str | None, typer.Option(help="Name of the vector; default: the rule's.")] = None,
    storage: options.Storage = "fp32",
    bake: Annotated[
        Path | None, typer.Option("--bake", help="Write base + merged vector, as aniso bake does.")
    ] = None,
    base: Annotated[str | None, typer.Option("--base", help="With --bake: the bank's base.")] = None,
    to: Annotated[
        str, typer.Option(help="With --bake: safetensors, open_clip, huggingface, …, or peft.")
    ] = "safetensors",
    plan: Annotated[bool, typer.Option("--plan", help="Show the memory that it takes, and stop.")] = False,
    overwrite: options.Overwrite = False,
    json: show.Json = False,
) -> None:
    """Merge a bank's vectors into one by a rule, without data."""
    MERGE_RULES.require(rule)
    for word, value, allowed in (
        ("--qkv", qkv, _QKV),
        ("--embeddings", embeddings, _EMBEDDINGS),
        ("--small", small, _SMALL),
        ("--space", space, _SPACE),
        ("--as", form, _FORMS),
        ("--to", to, checks.BAKED),
    ):
        checks.one_of(word, value, allowed)
    checks.known_storage(storage)
    _require_outputs(out, bake, base, plan=plan, overwrite=overwrite)
    given = _given_options(option, scale, form)
    checks.existing_bank(bank)
    from aniso.merge import MergeOptions, new_merge_rule, parsed_options, plan_merge

    made = new_merge_rule(rule, parsed_options(rule, given))
    opened = options.open_bank(bank, options.base_files(base) if base else None)
    chosen = opened.only(*vectors.split(",")) if vectors else opened
    how: MergeKeywords = {
        "name": name or rule,
        "storage": storage,
        "overwrite": overwrite,
        "qkv": qkv,
        "embeddings": embeddings,
        "small": small,
        "space": space,
    }
    estimate = plan_merge(chosen, made, MergeOptions(qkv, embeddings, small, space))
    if plan:
        show.as_json(estimate.as_dict()) if json else show.text(f"{estimate}\n")
        return
    # a bar over deltas as they are merged, in fp32; stored ones may be smaller
    with show.progress("merging", (made.reads * len(chosen) + 1) * estimate.written_bytes) as advance:
        how["progress"] = advance
        merged = _written(chosen, made, how, out)
    if bake is not None:
        assert base is not None
        _bake(merged, base, bake, to, overwrite)
    _report(merged, chosen, [place for place in (out, bake) if place], json)


def _require_outputs(
    out: Path | None, bake: Path | None, base: str | None, *, plan: bool, overwrite: bool
) -> None:
    """Check the outputs before torch is imported."""
    if out is None and bake is None and not plan:
        raise UsageError("USAGE", "there is nothing to write", fix="-o FILE.safetensors, or --bake DIR")
    if (bake is None) != (base is None):
        raise UsageError("USAGE", "--bake and --base belong together", fix="--bake DIR --base BASE")
    if base is not None:
        checks.existing_weights(base)
    if out is not None and _is_file(out):
        checks.free_file(out, overwrite=overwrite)
    elif out is not None and (out / "manifest.json").exists():
        if overwrite:
            raise UsageError(
                "USAGE",
                f"'{printable(out)}' is a bank, to which the vector is added: --overwrite has no meaning",
                fix="leave --overwrite out, and choose another --name if the bank has a vector of this one",
            )
    elif out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError("OUT-EXISTS", f"'{printable(out)}' exists and is no bank", fix="name another place")


def _is_file(out: Path) -> bool:
    return out.suffix == ".safetensors"


def _given_options(option: list[str] | None, scale: float | None, form: str | None) -> list[str]:
    given = list(option or ())
    for pair in given:
        if "=" not in pair:
            raise UsageError(
                "USAGE", f"invalid value '{printable(pair)}' for --option", fix="--option keep=0.2"
            )
    if scale is not None:
        if not math.isfinite(scale) or scale == 0:
            raise UsageError(
                "USAGE",
                f"invalid value {scale} for --scale",
                expected="a number other than 0",
                fix="--scale 1",
            )
        given.append(f"scale={scale}")
    return [*given, f"form={form}"] if form is not None else given


def _written(bank: Bank, rule: MergeRule, how: MergeKeywords, out: Path | None) -> TaskVector:
    """Write the merged vector to a file, to a new bank or into an existing one; return it."""
    from aniso.merge import merge as merge_vectors
    from aniso.merge import unread_merge
    from aniso.vectors import Bank

    if out is None:
        return merge_vectors(bank, rule, **how)
    if _is_file(out):
        how["to"] = out
        return merge_vectors(bank, rule, **how)
    vector = unread_merge(bank, rule, **how)
    if (out / "manifest.json").exists():
        return Bank.load(out).add(None, {vector.name: vector}, progress=how["progress"])[vector.name]
    return Bank({vector.name: vector}).save(out, storage=how["storage"], progress=how["progress"])[
        vector.name
    ]


def _bake(merged: TaskVector, base: str, out: Path, to: str, overwrite: bool) -> None:
    """Write the base with the merged vector added, or the vector as an adapter."""
    from aniso.compose import Baked, CardDetails, Coefficients, merge_adapters
    from aniso.vectors import Bank

    bank = Bank({merged.name: merged})
    ones = Coefficients.ones(bank)
    weights, details = options.base_files(base), CardDetails(command=show.this_command())
    if to == "peft":
        merge_adapters(weights, bank, ones).save(out, details=details, overwrite=overwrite)
        return
    baked = Baked(weights, bank, ones)
    with show.progress("baking", baked.nbytes) as advance:
        show.notes(baked.save(out, to=to, details=details, overwrite=overwrite, progress=advance))


def _report(merged: TaskVector, bank: Bank, places: list[Path], json: bool) -> None:
    norms = {name: bank[name].norm() for name in bank}
    if json:
        from dataclasses import asdict

        show.as_json(
            {
                "out": [str(place) for place in places],
                "name": merged.name,
                "blocks": len(merged.blocks),
                "norm": merged.norm(),
                "sources": norms,
                "origin": asdict(merged.provenance),
            }
        )
        return
    show.notes(merged.notes)
    show.table(("vector", "norm"), norms.items())
    for place in places:
        show.line(
            f"wrote {place}: '{merged.name}', {merged.provenance.source}, {len(merged.blocks)} of "
            f"{len(merged.layout.blocks)} blocks, norm {merged.norm():.4g}"
        )
