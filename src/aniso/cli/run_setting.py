"""What commands generated from settings do once their options are known."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from aniso.cli import show
from aniso.cli.run_options import OutputOptions, RuntimeOptions
from aniso.cli.setting_options import generated_options
from aniso.errors import AnisoError, UsageError
from aniso.experiments.input_files import check_input_files, read_names
from aniso.experiments.options import Options, options_of
from aniso.experiments.parsing import parse_setting
from aniso.experiments.processes import Processes, launch, require_shareable
from aniso.experiments.schedule_options import ScheduleOptions
from aniso.experiments.strict_yaml import Document, as_yaml, validated
from aniso.registry import METHODS, SETTINGS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from aniso.experiments.result import RunOptions
    from aniso.experiments.run_directory import RunDirectory
    from aniso.experiments.settings import Setting
    from aniso.learn import Tracker
    from aniso.progress import ProgressCallback
    from aniso.records import EpochRow, Record

O = TypeVar("O", bound=Options)  # noqa: E741
COMMAND_LINE = "the command line"


def run_setting(name: str, values: dict[str, Any]) -> None:
    """Run a setting from the options that were given; those that were not have their defaults."""
    runtime, output = taken(RuntimeOptions, values), taken(OutputOptions, values)
    setting = setting_from_options(name, values)
    if output.tensorboard:
        show.notes(["--tensorboard is now --track tensorboard; the old name still works"])
    if output.print_spec:
        show.text(as_yaml(setting.spec()))
        return
    if output.resume and not setting.method.resumes:
        raise UsageError(
            "USAGE",
            f"--resume is not supported with --method {setting.method.name}",
            fix="run it again without --resume",
        )
    if output.resume and output.out is None:
        raise UsageError("USAGE", "nothing to resume: no directory is named", fix="name it with -o")
    if not output.resume:  # a finished run is shown although its data may be gone
        check_input_files(setting, runtime.data)
    if output.plan:
        _print_plan(setting, runtime, output)
        return
    processes = Processes.from_environment()
    if runtime.shard_base and processes is None and runtime.devices == 1:
        raise UsageError(
            "USAGE",
            "--shard-base has no effect without --devices: there is one process",
            fix="--devices N starts N processes",
        )
    if processes is not None:
        require_shareable(setting)
        with processes.joined(runtime.device) as mesh, processes.own_directory(output.out) as out:
            _run(setting, runtime, output.model_copy(update={"out": out}), processes, mesh)
    elif runtime.devices > 1:
        require_shareable(setting)
        raise typer.Exit(launch(runtime.devices, sys.argv[1:]))
    else:
        _run(setting, runtime, output)


def taken(options: type[O], values: dict[str, Any]) -> O:
    """Take a class's options out of the given ones; errors name the option."""
    own = {name: values.pop(name) for name in options.model_fields if name in values}
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in own.items()}
    try:
        return validated(options, Document(COMMAND_LINE, plain, {}))
    except UsageError as e:
        info = options_of(options).get(str(e.facts.pop("key", "")))
        if info is not None:
            e.message = f"invalid value for {info.flags[-1].split('/')[0]}"
        raise


def setting_from_options(name: str, values: Mapping[str, Any]) -> Setting:
    """Return a setting from options of the command line; errors name the option."""
    _require_effect(name, values)
    given: dict[str, Any] = {"setting": name, **values}
    schedule = {key: given.pop(key) for key in ScheduleOptions.model_fields if key in given}
    if schedule:
        given["schedule"] = schedule
    if "classes" in given:
        given["classes"] = read_names(given["classes"])
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}
    try:
        return parse_setting(Document(COMMAND_LINE, plain, {}))
    except UsageError as e:
        key = str(e.facts.pop("key", "")).rpartition(".")[2]
        known = generated_options(name)
        if key in known:
            e.message = f"invalid value for {known[key].flags[-1]}"
        raise


def _require_effect(name: str, values: Mapping[str, Any]) -> None:
    """Raise an error for options that the chosen method does not have."""
    setting = SETTINGS.get(name)
    method = values.get("method", setting.model_fields["method"].default)
    setting.require_method(method)
    known = {*setting.model_fields, *METHODS.get(method).model_fields}
    known |= {*ScheduleOptions.model_fields} if "schedule" in known else set()
    useless = [f"--{key.replace('_', '-')}" for key in values if key not in known]
    if useless:
        first = next(key for key in values if key not in known)
        field = "schedule" if first in ScheduleOptions.model_fields else first
        owners = [m for m in setting.methods() if field in METHODS.get(m).model_fields]
        raise UsageError(
            "USAGE",
            f"{', '.join(useless)} {'has' if len(useless) == 1 else 'have'} no effect with --method {method}",
            expected=f"--method {' or '.join(owners)}",
            fix=f"leave {'it' if len(useless) == 1 else 'them'} out, or choose another --method",
        )


def _run(
    setting: Setting,
    runtime: RuntimeOptions,
    output: OutputOptions,
    processes: Processes | None = None,
    mesh: DeviceMesh | None = None,
) -> None:
    from aniso.cli.show_record import print_record
    from aniso.experiments.record import Clock, record
    from aniso.experiments.run_directory import RunDirectory
    from aniso.experiments.session import Session

    run = RunDirectory(output.out) if output.out is not None else None
    if run is not None:
        found = run.begin(setting, resume=output.resume)
        if found is not None:  # done already
            _compare(found, run, setting, runtime)
            print_record(found, run, as_json=output.json_)
            return
    clock = Clock()
    tracker = _tracker(setting, output, run)
    try:
        with show.item_progress() as progress:
            options = _run_options(runtime, output, run, progress, tracker)
            if processes is not None:
                options = replace(options, mesh=mesh, device=processes.device(options.device))
            result = Session(setting, options).run()
    except BaseException as e:
        if run is not None:
            run.forget(e)
        raise
    finally:
        if tracker is not None:
            tracker.finish()
    show.notes(result.notes)
    made = record(setting, result, clock)
    print_record(run.finish(made, result) if run is not None else made, run, as_json=output.json_)


def _compare(made: Record, run: RunDirectory, setting: Setting, runtime: RuntimeOptions) -> None:
    """Refuse to show a finished run as if it were of files that have changed since."""
    from aniso.experiments.result import RunOptions
    from aniso.experiments.session import Session

    try:
        run.require_unchanged(made, Session(setting, RunOptions(data=runtime.data)).content)
    except AnisoError as e:
        if e.code == "RUN-CHANGED":
            raise
        show.notes([f"the files it was made from could not be compared: {e.message}"])


def _run_options(
    runtime: RuntimeOptions,
    output: OutputOptions,
    run: RunDirectory | None,
    progress: ProgressCallback,
    tracker: Tracker | None,
) -> RunOptions:
    from aniso.compose import Runtime
    from aniso.experiments.result import RunOptions

    return RunOptions(
        data=runtime.data,
        workers=runtime.workers,
        device=runtime.device,
        runtime=Runtime(memory=runtime.memory, shard_base=runtime.shard_base, keep_freed=True),
        directory=run.path if run is not None else None,
        resume=output.resume,
        allow_env_change=output.allow_env_change,
        progress=progress,
        epoch_done=_epoch_printer(tracker),
    )


def _epoch_printer(tracker: Tracker | None) -> Callable[[EpochRow], None]:
    """Return what prints a line for every epoch."""
    begun = time.monotonic()

    def epoch_done(row: EpochRow) -> None:
        values = [f"{name} {value:.1%}" for name, value in list(row.accuracy.items())[:4]]
        values += [f"{name}: {value:.1%} as its teacher" for name, value in list(row.agreement.items())[:4]]
        values += [f"{name} perplexity {value:.2f}" for name, value in row.perplexity.items()]
        loss = "" if row.loss is None else f"loss {row.loss:.3f}"
        words = [word for word in (loss, ", ".join(values)) if word]
        if tracker is not None:
            tracker(row)
        seconds = time.monotonic() - begun
        show.progress_line(f"epoch {row.epoch}: {'; '.join(words) or 'the start'} ({seconds:.0f} s)")

    return epoch_done


def _tracker(setting: Setting, output: OutputOptions, run: RunDirectory | None) -> Tracker | None:
    from aniso.experiments.run_files import TENSORBOARD
    from aniso.learn import Tracker

    name = output.track or ("tensorboard" if output.tensorboard else None)
    if name is None:
        return None
    if name == "tensorboard" and run is None:
        raise UsageError("USAGE", "TensorBoard's files belong into a directory", fix="name one with -o")
    place = None if run is None else run.path / TENSORBOARD if name == "tensorboard" else run.path
    label = setting.name if run is None else run.path.name
    return Tracker(name, run=label, directory=place, config=setting.spec(), note=lambda n: show.notes([n]))


def _print_plan(setting: Setting, runtime: RuntimeOptions, output: OutputOptions) -> None:
    from aniso.cli.show_plan import print_plan
    from aniso.compose import Runtime
    from aniso.experiments.result import RunOptions
    from aniso.experiments.run_directory import RunDirectory
    from aniso.experiments.session import Session

    writes: list[str] = []
    if output.out is not None:
        RunDirectory(output.out).require_usable(setting, resume=output.resume)
        writes = RunDirectory.expected(setting)
    options = RunOptions(data=runtime.data, device=runtime.device, runtime=Runtime(memory=runtime.memory))
    print_plan(setting, Session(setting, options).plan(), writes, as_json=output.json_)
