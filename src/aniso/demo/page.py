"""The page of the tour, from the records that its commands wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aniso.compose import Coefficients
from aniso.demo.tour import Step
from aniso.errors import UsageError
from aniso.learn.analysis import by_depth, by_kind, five_numbers
from aniso.record_files import read_record
from aniso.records import Metrics
from aniso.report import PageFigure, Section, Table, bars, boxes, heat_map, page
from aniso.report.figures import block_label
from aniso.weights.atomic import write_text

PAGE = "index.html"


def write_page(directory: Path, done: Sequence[Step]) -> tuple[list[Table], tuple[str, ...]]:
    """Write the page; return its tables for the terminal, and notes on what is missing."""
    tables = [_few_shot(directory), _addition(directory), _negation(directory)]
    notes: list[str] = []
    try:
        figures = _figures(directory)
    except UsageError as e:
        if e.code != "MODEL-LIBRARY":
            raise
        figures, notes = {}, [f"the page has no figures: {e.fix}"]
    sections = [
        Section(
            "Overview",
            (
                "Everything on this page was computed on this machine by the commands at the end, with the "
                "small CLIP that comes with aniso. The model is tiny; the method is the same for a "
                "ViT-L/14.",
            ),
        ),
        _section("Few-shot: handwritten digits", tables[0], figures, "few-shot", _FEW_SHOT),
        _section("Addition: three tasks in one model", tables[1], figures, "addition", _ADDITION),
        _section(
            "Negation: digits forgotten, colours kept",
            tables[2],
            figures,
            "negation",
            _negation_rule(directory),
            *_compared_with_guessing(directory),
        ),
        Section("Commands", commands=tuple(str(step) for step in done)),
    ]
    write_text(
        directory / PAGE,
        page("aniso demo: few-shot learning, addition and negation", sections),
        overwrite=True,
    )
    return tables, tuple(notes)


_FEW_SHOT = (
    "Learned from four labelled images of each digit: one coefficient for each of the bank's 21 vectors and "
    "each parameter block, starting at zero."
)
_ADDITION = (
    "Three task vectors in one model. One scale for all of them trades one task for another; coefficients "
    "per vector and block mostly do not."
)
_NEGATION = (
    "Coefficients for the digits' vector that lower the accuracy on digits and keep colours at 95 % or more "
    "of their zero-shot accuracy on validation images. The search chooses one of {scales} scales by this "
    "rule, the learned run one of {looks} looks during training, on the same images."
)
_FORGOTTEN = (
    "Both methods are at or below guessing, which is {guessing} for digits: the task is forgotten. A number "
    "below guessing is not forgotten further; the model is then wrong more consistently. Learning raises the "
    "loss on digits, not the number of errors, and lowers that on colours: compare the two there."
)


def _section(heading: str, table: Table, figures: dict[str, bytes], name: str, *text: str) -> Section:
    captions = {
        "bars": "Accuracy on test images.",
        "heat": "Coefficients: vectors by blocks, from the input on the left to the output on the right.",
        "kind": "Coefficients by kind of block.",
        "depth": "Coefficients by layer.",
    }
    found = [(figures.get(f"{name} {kind}"), caption) for kind, caption in captions.items()]
    return Section(
        heading, text, table, tuple(PageFigure(drawn, caption) for drawn, caption in found if drawn)
    )


def _metrics(directory: Path, name: str) -> Metrics:
    return read_record(directory / name / "record.json").metrics


def _share(value: float) -> str:
    return f"{value:.1%}"


def _accuracies(metrics: Metrics) -> dict[str, float]:
    return {name: score.accuracy for name, score in metrics.accuracy.items()}


def _few_shot(directory: Path) -> Table:
    metrics = _metrics(directory, "few-shot")
    (score,) = metrics.accuracy.values()
    low, high = score.interval or (score.accuracy, score.accuracy)
    (zero,) = metrics.zero_shot.values()
    rows = (
        ("zero-shot", _share(zero), ""),
        ("learned, 4 images of each class", _share(score.accuracy), f"{_share(low)} to {_share(high)}"),
    )
    return Table("Digits", ("", "accuracy", "95 % interval"), rows)


def _addition(directory: Path) -> Table:
    search, learned = _metrics(directory, "addition-search"), _metrics(directory, "addition")
    rows = {
        "zero-shot": learned.zero_shot,
        "one scale, searched": _accuracies(search),
        "learned by block": _accuracies(learned),
        "each task's own vector alone": learned.reference or {},
    }
    tasks = list(_accuracies(learned))
    shown = [
        (name, *(_share(found[t]) for t in tasks), _share(sum(found[t] for t in tasks) / len(tasks)))
        for name, found in rows.items()
    ]
    return Table("Three tasks", ("", *tasks, "mean"), tuple(shown))


def _negation(directory: Path) -> Table:
    search, learned = _metrics(directory, "negation-search"), _metrics(directory, "negation")
    rows = {
        "zero-shot": learned.zero_shot,
        "one scale, searched": _accuracies(search),
        "learned by block": _accuracies(learned),
    }
    rows["guessing"] = {task: _guessing(directory, task) for task in ("digits", "colours")}
    shown = [(name, _share(found["digits"]), _share(found["colours"])) for name, found in rows.items()]
    return Table("Digits negated", ("", "digits (lower is better)", "colours (control)"), tuple(shown))


def _guessing(directory: Path, task: str) -> float:
    """Return the accuracy of a guess: classes have equally many images."""
    return 1 / sum(path.is_dir() for path in (directory / "data" / task).iterdir())


def _negation_rule(directory: Path) -> str:
    scales, looks = (len(_metrics(directory, name).history) for name in ("negation-search", "negation"))
    return _NEGATION.format(scales=scales, looks=looks - 1)  # the first is the base


def _compared_with_guessing(directory: Path) -> tuple[str, ...]:
    """Return the paragraph on accuracies below guessing, if both methods are there within their error."""
    runs = [_metrics(directory, name).accuracy["digits"] for name in ("negation-search", "negation")]
    guessing = _guessing(directory, "digits")
    low = all((score.interval or (score.accuracy,))[0] <= guessing for score in runs)
    return (_FORGOTTEN.format(guessing=_share(guessing)),) if low else ()


def _figures(directory: Path) -> dict[str, bytes]:
    out: dict[str, bytes] = {}
    for name in ("few-shot", "addition", "negation"):
        found = Coefficients.load(directory / name / "coefficients.safetensors")
        out[f"{name} heat"] = heat_map(
            found.matrix().tolist(), found.vectors, [block_label(b) for b in found.block_labels]
        )
        groups: dict[str, Callable[[Coefficients], Any]] = {"kind": by_kind, "depth": by_depth}
        for by, grouped in groups.items():
            out[f"{name} {by}"] = boxes({k: five_numbers(v) for k, v in grouped(found).items()}, f"by {by}")
    out["addition bars"] = bars(_bars(directory, "addition"))
    out["negation bars"] = bars(_bars(directory, "negation"))
    return out


def _bars(directory: Path, name: str) -> dict[str, dict[str, float]]:
    search, learned = _metrics(directory, f"{name}-search"), _metrics(directory, name)
    return {
        task: {
            "zero-shot": learned.zero_shot[task],
            "one scale, searched": _accuracies(search)[task],
            "learned by block": value,
        }
        for task, value in _accuracies(learned).items()
    }
