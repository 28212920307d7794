"""What ``aniso fit`` does once its options are known."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aniso.cli import options, show
from aniso.cli.fit_options import HOW, SCHEDULE
from aniso.compose import Runtime, show_bytes
from aniso.errors import AnisoError, InputError, UsageError, printable
from aniso.experiments.carried_out import work_of
from aniso.experiments.outcome import RunOptions
from aniso.experiments.record import Clock, record
from aniso.experiments.run_directory import TENSORBOARD, RunDirectory
from aniso.experiments.settings import BaseSetting
from aniso.experiments.spec import parsed
from aniso.experiments.strict_yaml import Document, as_yaml
from aniso.learn import TensorBoardWriter
from aniso.records import EpochRow, Record
from aniso.weights.files import RawFile

_PATH = 255  # what is longer is no file's name, and cannot even be looked for
_COLUMN = {
    "coefficients": "learned",
    "gradient-free": "learned",
    "weights": "fine-tuned",
    "search": "one scale",
    "vector": "with own vector",
    "none": "accuracy",
}


def carry_out(kind: str, said: dict[str, Any]) -> None:
    how = {key: said.pop(key, None) for key in HOW}
    setting = _setting(kind, said)
    if how["print_spec"]:
        show.text(as_yaml(setting.spec()))
        return
    if how["plan"]:
        _plan(setting, how)
        return
    if how["resume"] and setting.method == "gradient-free":
        raise UsageError(
            "USAGE",
            "what is learned without gradients cannot be gone on with",
            fix="run it again without --resume",
        )
    run = RunDirectory(how["out"]) if how["out"] is not None else None
    if run is not None:
        found = run.begin(setting, resume=bool(how["resume"]))
        if found is not None:  # done already
            _compare(found, run, setting, how)
            _print(found.content(), run, how)
            return
    elif how["resume"]:
        raise UsageError("USAGE", "there is nothing to go on with", fix="name the run's directory with -o")
    clock = Clock()
    try:
        with show.telling() as progress:
            outcome = work_of(setting, _circumstances(how, run, progress, show.told_line)).run()
    except BaseException as e:
        if run is not None:
            run.forget(e)
        raise
    show.notes(outcome.notes)
    made = record(setting, outcome, clock)
    _print((run.finish(made, outcome) if run is not None else made).content(), run, how)


def _compare(made: Record, run: RunDirectory, setting: BaseSetting, how: dict[str, Any]) -> None:
    """A finished run is not shown as if it were of files that have changed since."""
    try:
        run.require_unchanged(made, work_of(setting, RunOptions(data=how["data"])).content)
    except AnisoError as e:
        if e.code == "RUN-CHANGED":
            raise
        show.notes([f"the files it was made from could not be compared: {e.message}"])


def _setting(kind: str, said: dict[str, Any]) -> BaseSetting:
    """Only what was said: for the rest the setting's own values hold."""
    given = {key: value for key, value in said.items() if value is not None}
    schedule = {field: given.pop(key) for key, field in SCHEDULE.items() if key in given}
    if "on_bad_image" in given:
        given["on_bad_image"] = options.bad_images(given["on_bad_image"])
    if "classes" in given:
        given["classes"] = _names(given["classes"])
    data = {"setting": kind, **given, **({"schedule": schedule} if schedule else {})}
    return parsed(Document("the command line", data, {}))


def _names(said: list[str]) -> list[str]:
    """Class names: a text file's lines, or what was said itself."""
    if len(said) != 1 or len(said[0]) > _PATH or not Path(said[0]).is_file():
        return said
    file = RawFile(Path(said[0]))
    try:
        lines = file.read(0, file.size).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise InputError(
            "DATA-CLASS",
            f"'{printable(said[0])}' is no text",
            expected="a class name a line",
            fix="use UTF-8",
        ) from None
    return [line.strip() for line in lines if line.strip()]


def _circumstances(
    how: dict[str, Any], run: RunDirectory | None, progress: Any, say: Callable[[str], None]
) -> RunOptions:
    begun = time.monotonic()
    board = _board(how, run)

    def epoch_done(row: EpochRow) -> None:
        found = [f"{name} {value:.1%}" for name, value in list(row.accuracy.items())[:4]]
        found += [f"{name} perplexity {value:.2f}" for name, value in row.perplexity.items()]
        loss = "" if row.loss is None else f"loss {row.loss:.3f}"
        words = [word for word in (loss, ", ".join(found)) if word]
        if board is not None:
            board(row)
        say(f"epoch {row.epoch}: {'; '.join(words) or 'the base'} ({time.monotonic() - begun:.0f} s)")

    return RunOptions(
        data=how["data"],
        workers=how["workers"],
        device=how["device"],
        runtime=Runtime(memory=how["memory"], keep_freed=True),
        directory=run.path if run is not None else None,
        resume=bool(how["resume"]),
        allow_env_change=bool(how["allow_env_change"]),
        progress=progress,
        epoch_done=epoch_done,
    )


def _board(how: dict[str, Any], run: RunDirectory | None) -> TensorBoardWriter | None:
    if not how["tensorboard"]:
        return None
    if run is None:
        raise UsageError("USAGE", "TensorBoard's files belong into a directory", fix="name one with -o")
    return TensorBoardWriter(run.path / TENSORBOARD)


def _print(made: dict[str, Any], run: RunDirectory | None, how: dict[str, Any]) -> None:
    if how["json"]:
        show.as_json(made)
        return
    metrics = made["metrics"]
    if made["spec"]["setting"] == "lm":
        method = made["spec"]["method"]
        _print_texts(metrics, "base" if method == "none" else _COLUMN[method])
    else:
        _print_tasks(made, metrics)
    _print_facts(metrics)
    if run is not None:
        show.line(f"wrote {run.path}: {', '.join(run.outputs())}")


def _print_texts(metrics: dict[str, Any], method: str) -> None:
    before, after = metrics.get("base_perplexity", {}), metrics.get("perplexity", {})
    rows = []
    for name, one in metrics["accuracy"].items():
        then = f"{before[name]:.2f}" if name in before else ""
        rows.append((name, one["total"], then, f"{after[name]:.2f}", f"{one['accuracy']:.1%}"))
    columns = ("texts", "tokens", "base: perplexity", f"{method}: perplexity", "tokens right")
    _print_table(columns, rows)


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Without columns that have nothing in them."""
    shown = [i for i in range(len(columns)) if any(row[i] != "" for row in rows)]
    if rows:
        show.table([columns[i] for i in shown], [[row[i] for i in shown] for row in rows])


def _print_tasks(made: dict[str, Any], metrics: dict[str, Any]) -> None:
    zero_shot, own = metrics.get("zero_shot", {}), metrics.get("reference", {})
    rows = []
    for name, one in metrics["accuracy"].items():
        low, high = one["interval"]
        before = f"{zero_shot[name]:.1%}" if name in zero_shot else ""
        tuned = f"{own[name]:.1%}" if name in own else ""
        rows.append((name, one["total"], before, f"{one['accuracy']:.1%}", f"{low:.1%} to {high:.1%}", tuned))
    method = _COLUMN[made["spec"]["method"]]
    if made["spec"].get("train") == "layernorm" and method == "learned":
        method = "layer norms"
    if "head" in metrics:
        kind = metrics["head"]["kind"]
        method = kind if made["spec"]["method"] == "none" else f"{method} + {kind}"
    columns = ("task", "pictures", "zero-shot", method, "95 % interval", "own vector")
    _print_table(columns, rows)
    if len(rows) > 1:
        mean = sum(one["accuracy"] for one in metrics["accuracy"].values()) / len(rows)
        show.line(f"mean over {len(rows)} tasks: {mean:.1%}")


def _print_facts(metrics: dict[str, Any]) -> None:
    """What was found beside accuracies, and how."""
    _print_answers(metrics)
    for name, one in metrics.get("out_of_domain", {}).items():
        low, high = one["interval"]
        show.line(f"{name}, with the same classes: {one['accuracy']:.1%} ({low:.1%} to {high:.1%})")
    if "kept_epoch" in metrics:
        show.line(
            f"epoch {metrics['kept_epoch']} of {metrics['epochs']} kept, {metrics['trainable']:,} trained"
        )
    if "kept_look" in metrics:
        best = "the base" if metrics["kept_look"] == 0 else f"the best of {_tries(metrics):,} tries"
        show.line(f"{best} kept, {metrics['trainable']:,} trained")
    if "kept_step" in metrics.get("head", {}):
        head = metrics["head"]
        show.line(f"head: step {head['kept_step']} of {head['steps']} kept, {head['trainable']:,} trained")
    if "scale" in metrics:
        show.line(f"scale {metrics['scale']:g}")


def _tries(metrics: dict[str, Any]) -> int:
    """How many there had been when what is kept was the best."""
    return int(metrics["history"][metrics["kept_look"]]["evaluations"])


def _print_answers(metrics: dict[str, Any]) -> None:
    """What can be told without labels."""
    for name, one in metrics.get("online", {}).items():
        found = f"{one['accuracy']:.1%} right" if "accuracy" in one else _counted(one["counts"])
        show.line(f"{name}, answered before learning from each batch: {found}")
    if "answers" not in metrics:
        return
    found = metrics["answers"]
    before, after = found["confidence"]
    show.line(
        f"same answer as zero-shot: {found['agreement']:.1%}; mean confidence {before:.1%} -> {after:.1%}"
    )
    show.line(f"answers: {_counted(found['counts'])}")


def _counted(counts: dict[str, int]) -> str:
    """The most frequent answers first."""
    listed = sorted(counts.items(), key=lambda one: -one[1])
    shown = ", ".join(f"{name} {count:,}" for name, count in listed[:12])
    return f"{shown} … {len(listed) - 12} more classes" if len(listed) > 12 else shown


def _plan(setting: BaseSetting, how: dict[str, Any]) -> None:
    out: Path | None = how["out"]
    if out is not None:
        RunDirectory(out).require_usable(setting, resume=bool(how["resume"]))
    memory, facts = work_of(
        setting, RunOptions(data=how["data"], device=how["device"], runtime=Runtime(memory=how["memory"]))
    ).plan()
    trainable = facts.get("trainable", 0)
    state = 4 * 4 * trainable  # values, two moments, the kept ones
    facts["disk_bytes"] = 3 * state + 4 * trainable if out is not None else 0
    facts["writes"] = RunDirectory.expected(setting) if out is not None else []
    if memory is not None:
        facts |= {"memory_bytes": memory.memory, "strategy": memory.strategy}
    if how["json"]:
        show.as_json({"spec": setting.spec(), **facts})
        return
    for key, value in facts.items():
        shown = (
            show_bytes(value)
            if key.endswith("_bytes")
            else _said(value, "rows" if key == "texts" else "pictures")
        )
        show.line(f"{key.removesuffix('_bytes').replace('_', ' '):14} {shown}")


def _said(value: Any, unit: str) -> str:
    if isinstance(value, dict) and "strategy" in value:
        kept = f"{value['cells']:,} cells of {len(value['vectors'])} vectors"
        return f"{value['strategy']}, budget {value['budget']}: {kept}"
    if isinstance(value, dict):
        return ", ".join(f"{name} ({count:,} {unit})" for name, count in value.items()) or "nothing"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "nothing"
    return f"{value:,}" if isinstance(value, int) else str(value)
