"""The page of the tour, from the records that its commands left."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aniso.compose import Coefficients
from aniso.demo.tour import Step
from aniso.errors import UsageError
from aniso.learn.analysis import by_depth, by_kind, five_numbers
from aniso.report import Section, Table, bars, boxes, heat_map, page
from aniso.weights.atomic import write_text

PAGE = "index.html"


def write_page(directory: Path, done: Sequence[Step]) -> tuple[list[Table], tuple[str, ...]]:
    """Write the page; gives its tables for the terminal, and what had to be left out."""
    tables = [_few_shot(directory), _addition(directory), _negation(directory)]
    notes: list[str] = []
    try:
        pictures = _pictures(directory)
    except UsageError as e:
        if e.code != "MODEL-LIBRARY":
            raise
        pictures, notes = {}, [f"the page has no figures: {e.fix} draws them"]
    sections = [
        Section(
            "What this is",
            (
                "Everything here was made on this machine a moment ago, by the commands at the end, with the "
                "small CLIP that comes with aniso. Its size is that of a toy; the method is the same for a "
                "ViT-L/14.",
            ),
        ),
        _section("Few-shot: handwritten digits", tables[0], pictures, "few-shot", _FEW_SHOT),
        _section("Addition: three tasks in one model", tables[1], pictures, "addition", _ADDITION),
        _section("Negation: digits forgotten, colours kept", tables[2], pictures, "negation", _NEGATION),
        Section("The commands", commands=tuple(str(step) for step in done)),
    ]
    write_text(directory / PAGE, page("aniso: what composing task vectors can do", sections), overwrite=True)
    return tables, tuple(notes)


_FEW_SHOT = (
    "The base has seen four labelled pictures of each digit. What it gets from the bank's 21 vectors is "
    "decided block by block: one coefficient for each vector and block, starting at zero."
)
_ADDITION = (
    "Three vectors of three tasks. One scale for all of them has to trade one task for another; "
    "coefficients by block mostly do not."
)
_NEGATION = (
    "The digits' vector, with coefficients that make digits worse and leave colours as good as they were: "
    "at least 95 % of its accuracy on validation pictures."
)


def _section(heading: str, table: Table, pictures: dict[str, bytes], name: str, text: str) -> Section:
    captions = {
        "bars": "Accuracy on test pictures.",
        "heat": "Coefficients: vectors by blocks, from the input on the left to the output on the right.",
        "kind": "Coefficients by kind of block.",
        "depth": "Coefficients by layer.",
    }
    found = [(pictures.get(f"{name} {kind}"), caption) for kind, caption in captions.items()]
    return Section(heading, (text,), table, tuple((drawn, said) for drawn, said in found if drawn))


def _record(directory: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / name / "record.json").read_text())
    return found


def _share(value: float) -> str:
    return f"{value:.1%}"


def _accuracies(record: dict[str, Any]) -> dict[str, float]:
    return {name: one["accuracy"] for name, one in record["metrics"]["accuracy"].items()}


def _few_shot(directory: Path) -> Table:
    record = _record(directory, "few-shot")
    (task,) = record["metrics"]["accuracy"].values()
    low, high = task["interval"]
    (zero,) = record["metrics"]["zero_shot"].values()
    rows = (
        ("zero-shot", _share(zero), ""),
        ("learned, 4 pictures of each class", _share(task["accuracy"]), f"{_share(low)} to {_share(high)}"),
    )
    return Table("Digits", ("", "accuracy", "95 % interval"), rows)


def _addition(directory: Path) -> Table:
    search, learned = _record(directory, "addition-search"), _record(directory, "addition")
    rows = {
        "zero-shot": learned["metrics"]["zero_shot"],
        "one scale, searched": _accuracies(search),
        "learned by block": _accuracies(learned),
        "each task's own vector alone": learned["metrics"]["reference"],
    }
    tasks = list(_accuracies(learned))
    shown = [
        (name, *(_share(found[t]) for t in tasks), _share(sum(found[t] for t in tasks) / len(tasks)))
        for name, found in rows.items()
    ]
    return Table("Three tasks", ("", *tasks, "mean"), tuple(shown))


def _negation(directory: Path) -> Table:
    search, learned = _record(directory, "negation-search"), _record(directory, "negation")
    rows = {
        "zero-shot": learned["metrics"]["zero_shot"],
        "one scale, searched": _accuracies(search),
        "learned by block": _accuracies(learned),
    }
    shown = [(name, _share(found["digits"]), _share(found["colours"])) for name, found in rows.items()]
    return Table("Digits taken out", ("", "digits (lower is better)", "colours (to be kept)"), tuple(shown))


def _pictures(directory: Path) -> dict[str, bytes]:
    out: dict[str, bytes] = {}
    for name in ("few-shot", "addition", "negation"):
        found = Coefficients.load(directory / name / "coefficients.safetensors")
        out[f"{name} heat"] = heat_map(
            found.matrix().tolist(), found.vectors, [_short(b) for b in found.blocks]
        )
        groups: dict[str, Callable[[Coefficients], Any]] = {"kind": by_kind, "depth": by_depth}
        for by, grouped in groups.items():
            out[f"{name} {by}"] = boxes({k: five_numbers(v) for k, v in grouped(found).items()}, f"by {by}")
    out["addition bars"] = bars(_bars(directory, "addition"))
    out["negation bars"] = bars(_bars(directory, "negation"))
    return out


def _short(block: str) -> str:
    """What tells blocks of a vision transformer apart: ``3.mlp.c_fc.weight``."""
    return block.removeprefix("visual.").removeprefix("transformer.resblocks.")


def _bars(directory: Path, name: str) -> dict[str, dict[str, float]]:
    search, learned = _record(directory, f"{name}-search"), _record(directory, name)
    return {
        task: {
            "zero-shot": learned["metrics"]["zero_shot"][task],
            "one scale, searched": _accuracies(search)[task],
            "learned by block": value,
        }
        for task, value in _accuracies(learned).items()
    }
