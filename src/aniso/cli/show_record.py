"""What a run prints when it ends: its record as tables, or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from aniso.cli import show
from aniso.registry import METHODS

if TYPE_CHECKING:
    from aniso.experiments.run_directory import RunDirectory
    from aniso.records import Metrics, Record

_MOST_CLASSES = 12  # in a line of counts


def print_record(record: Record, run: RunDirectory | None, *, as_json: bool) -> None:
    """Print a record: accuracies or perplexities first, then how they were reached."""
    if as_json:
        show.as_json(record.content())
        return
    if record.metrics.perplexity:
        _print_texts(record)
    else:
        _print_tasks(record)
    _print_predictions(record.metrics)
    _print_training(record.metrics)
    if run is not None:
        show.line(f"wrote {run.path}: {', '.join(run.outputs())}")


def _column(record: Record) -> str:
    """The heading of the method's column."""
    method = METHODS.get(record.spec.method)
    head = record.metrics.head
    if head is None:
        return str(method.column)
    return f"{method.column} + {head.kind}" if method.changes_model else head.kind


def _print_texts(record: Record) -> None:
    metrics, method = record.metrics, METHODS.get(record.spec.method)
    column = method.column if method.changes_model else "base"
    rows = []
    for name, score in metrics.accuracy.items():
        before = metrics.base_perplexity.get(name)
        shown = "" if before is None else f"{before:.2f}"
        after = f"{metrics.perplexity[name]:.2f}"
        rows.append((name, score.total, shown, after, f"{score.accuracy:.1%}"))
    columns = ("texts", "tokens", "base: perplexity", f"{column}: perplexity", "next-token accuracy")
    _print_table(columns, rows)


def _print_tasks(record: Record) -> None:
    metrics, own = record.metrics, record.metrics.reference or {}
    rows = []
    for name, score in metrics.accuracy.items():
        low, high = score.interval or (0.0, 1.0)
        before = f"{metrics.zero_shot[name]:.1%}" if name in metrics.zero_shot else ""
        tuned = f"{own[name]:.1%}" if name in own else ""
        interval = f"{low:.1%} to {high:.1%}"
        alone = [_share(part, name) for part in (metrics.head_alone, metrics.without_head)]
        rows.append((name, score.total, before, *alone, f"{score.accuracy:.1%}", interval, tuned))
    kinds = (f"{metrics.head.kind if metrics.head is not None else 'head'} alone", f"{_method(record)} alone")
    columns = ("task", "images", "zero-shot", *kinds, _column(record), "95 % interval", "own vector")
    _print_table(columns, rows)
    if record.spec.setting == "negation":
        _print_control(record)
    elif len(rows) > 1:
        mean = sum(score.accuracy for score in metrics.accuracy.values()) / len(rows)
        show.line(f"mean over {len(rows)} tasks: {mean:.1%}")


def _print_control(record: Record) -> None:
    """Print what the control kept of its zero-shot accuracy; a mean with the target would mean nothing."""
    name = record.spec.control or ""
    before, floor = record.metrics.zero_shot.get(name), (record.spec.model_extra or {}).get("floor")
    if not before or floor is None:
        return
    kept = record.accuracy(name) / before
    below = "" if kept >= floor else "; below it on test: the floor is kept on validation data"
    show.line(f"control kept {100 * kept:.1f} % of {100 * before:.1f} (floor {100 * floor:g} %){below}")


def _share(shares: Mapping[str, float], name: str) -> str:
    return f"{shares[name]:.1%}" if name in shares else ""


def _method(record: Record) -> str:
    return str(METHODS.get(record.spec.method).column)


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table without the columns that have nothing in them."""
    shown = [i for i in range(len(columns)) if any(row[i] != "" for row in rows)]
    if rows:
        show.table([columns[i] for i in shown], [[row[i] for i in shown] for row in rows])


def _print_predictions(metrics: Metrics) -> None:
    """Print what can be said without labels."""
    for name, online in metrics.online.items():
        found = _counted(online.counts) if online.accuracy is None else f"accuracy {online.accuracy:.1%}"
        show.line(f"{name}, predicted before learning from each batch: {found}")
    if metrics.answers is None:
        return
    before, after = metrics.answers.confidence or (0.0, 0.0)
    show.line(
        f"same prediction as zero-shot: {metrics.answers.agreement:.1%}; "
        f"mean confidence {before:.1%} -> {after:.1%}"
    )
    show.line(f"predictions: {_counted(metrics.answers.counts)}")


def _counted(counts: Mapping[str, int]) -> str:
    """The most frequent classes first."""
    listed = sorted(counts.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {count:,}" for name, count in listed[:_MOST_CLASSES])
    left = len(listed) - _MOST_CLASSES
    return f"{shown} … {left} more classes" if left > 0 else shown


def _print_training(metrics: Metrics) -> None:
    """Print what was kept, and what was found beside accuracies."""
    for name, score in metrics.out_of_domain.items():
        low, high = score.interval or (0.0, 1.0)
        show.line(f"{name}, out of domain: {score.accuracy:.1%} ({low:.1%} to {high:.1%})")
    if metrics.supervision == "unlabelled":
        show.line("no label was used to learn or to choose")
    if metrics.kept_epoch is not None:
        show.line(
            f"kept epoch {metrics.kept_epoch} of {metrics.epochs}; {metrics.trainable:,} trained parameters"
        )
    if metrics.kept_look is not None:
        tries = metrics.history[metrics.kept_look].evaluations or 0
        kept = "the base" if metrics.kept_look == 0 else f"the best of {tries:,} evaluations"
        show.line(f"kept {kept}; {metrics.trainable:,} trained parameters")
    head, chosen = metrics.head, metrics.selection
    if head is not None and head.kept_step is not None:
        show.line(f"head: kept step {head.kept_step} of {head.steps}; {head.trainable:,} trained parameters")
    if metrics.scale is not None:
        show.line(f"scale {metrics.scale:g}")
    if chosen is not None:
        kept = ", ".join(f"{name} ({count} blocks)" for name, count in chosen.vectors.items())
        show.line(f"selected by {chosen.strategy}, budget {chosen.budget}: {kept}")
