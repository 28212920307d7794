"""Where the parts of a classifier lie: a run, a baked directory, or a base with coefficients; no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, final

from pydantic import BaseModel, ConfigDict, ValidationError

from aniso.classes import DEFAULT_PROMPTS, TEXT_PROMPTS, ClassList
from aniso.errors import InputError, UsageError, printable
from aniso.experiments.class_lists import read_class_lists
from aniso.experiments.prediction.tables import ItemKind
from aniso.experiments.run_files import ADAPTER, CLASSES, COEFFICIENTS, HEAD, RECORD, SPEC, WEIGHTS
from aniso.experiments.strict_yaml import read_yaml
from aniso.record_files import read_record
from aniso.records import Record

_CONFIG = "config.json"
_WITHOUT_LABELS: Final = ("test-time",)
"""Settings that promise to use no label: their probabilities are calibrated only if it is asked for."""


@final
@dataclass(frozen=True)
class ModelOptions:
    """What a command says about the model and its classes."""

    model: str
    base: str | None = None
    weights: str | None = None
    bank: str | None = None
    coefficients: Path | None = None
    head: Path | None = None
    linearised: bool = False
    classes: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    task: str | None = None


@final
@dataclass(frozen=True)
class ModelFiles:
    """The parts of a classifier, by the files that they are loaded from."""

    label: str
    """The model in words, for messages and headers."""
    base: str
    weights: str | None = None
    bank: str | None = None
    seed: int = 0
    """Draws a random bank."""
    coefficients: Path | None = None
    trained: Path | None = None
    """All weights, after a run has trained them; ``weights`` are those that it began with."""
    adapter: Path | None = None
    head: Path | None = None
    linearised: bool = False
    classes: ClassList | None = None
    task: str | None = None
    """The task whose classes are used if ``classes`` is None."""
    prompts: tuple[str, ...] = ()
    """Replace those of the task."""
    validation_task: str | None = None
    """The task that a run learned from labels, whose validation split calibrates its probabilities."""
    split_seed: int = 0
    is_run: bool = False


class _RunSpec(BaseModel):
    """What a run's spec says about its model and data; its other keys do not matter here."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=False)

    setting: str
    method: str
    model: str
    weights: str | None = None
    bank: str | None = None
    seed: int = 0
    linearised: bool = False
    split_seed: int = 0
    task: str | None = None
    classes: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()


def find_model(options: ModelOptions, kind: ItemKind) -> ModelFiles:
    """Return the parts of the classifier that options name; ``kind`` of items decides default prompts.

    Raises an error if no classes are known, as far as this is known without loading the model.
    """
    _require_pairs(options)
    directory = Path(options.model).expanduser()
    is_run = (directory / SPEC).is_file()
    files = _run(directory, options) if is_run else _base(directory, options)
    files = replace(files, head=options.head or files.head, prompts=options.prompts)
    if files.head is not None and options.prompts:
        raise UsageError("USAGE", "--prompt has no effect with a head", fix="leave out --prompt")
    return _with_classes(files, directory, options, kind)


def _require_pairs(options: ModelOptions) -> None:
    if options.coefficients is not None and options.bank is None:
        raise UsageError("USAGE", "--coefficients need the bank that they were learned on", fix="--bank DIR")
    if options.classes and options.task is not None:
        raise UsageError("USAGE", "--classes and --task both name classes", fix="leave out one of them")
    if len(options.classes) == 1:
        raise UsageError(
            "DATA-CLASS",
            f"one class, '{printable(options.classes[0])}', leaves nothing to choose",
            fix="repeat --classes, or name a text file with a class per line",
        )


def _base(directory: Path, options: ModelOptions) -> ModelFiles:
    if options.base is not None:
        raise UsageError("USAGE", "--base replaces the base of a run: MODEL is none", fix="leave out --base")
    if options.bank is not None and options.coefficients is None:
        raise UsageError("USAGE", "--bank needs --coefficients", fix="--coefficients FILE")
    head = directory / HEAD
    label = directory.resolve().name if directory.is_dir() else options.model
    return ModelFiles(
        label if options.coefficients is None else f"{label} composed with {options.coefficients.stem}",
        options.model,
        options.weights,
        options.bank,
        coefficients=options.coefficients,
        head=head if head.is_file() else None,
        linearised=options.linearised,
    )


def _run(directory: Path, options: ModelOptions) -> ModelFiles:
    if options.coefficients is not None or options.linearised or options.weights is not None:
        raise UsageError(
            "USAGE",
            f"'{printable(directory)}' is the directory of a run, which has its own",
            given="--coefficients, --weights or --linearised",
            fix="leave them out",
        )
    if _record(directory).spec.setting == "lm":
        raise UsageError(
            "DATA-ITEM",
            f"the run in '{printable(directory)}' is of a language model, which has no classes",
            fix="aniso eval MODEL --texts FILE",
        )
    return files_of_run(directory, options.base, options.bank)


def files_of_run(directory: Path, base: str | None = None, bank: str | None = None) -> ModelFiles:
    """Return the parts of the model in a run's directory; ``base`` and ``bank`` replace those of its spec."""
    spec = _spec(directory)
    made = {name: directory / name for name in (COEFFICIENTS, WEIGHTS, ADAPTER, HEAD)}
    there = {name: path for name, path in made.items() if path.exists()}
    if not set(there) - {HEAD} and spec.method != "none":
        raise InputError(
            "FILE-MISSING",
            f"the run in '{printable(directory)}' keeps no model: method '{printable(spec.method)}'",
            expected=", ".join(made),
            fix="name base, bank and coefficients: 'aniso coefficients make VECTOR=1 --bank BANK -o FILE'",
        )
    weights = spec.weights if base is None or _exists(spec.weights) else None  # --base replaces both
    coefficients = there.get(COEFFICIENTS)
    files = ModelFiles(
        f"{directory.resolve().name} ({spec.setting}, {spec.method}, {_name(spec.model)})",
        _existing(base or spec.model, "the base", "--base", directory),
        None if weights is None else _existing(weights, "the file of weights", "--base", directory),
        seed=spec.seed,
        coefficients=coefficients,
        trained=there.get(WEIGHTS) if coefficients is None else None,
        adapter=there.get(ADAPTER) if coefficients is None else None,
        head=there.get(HEAD),
        linearised=spec.linearised,
        task=spec.task,
        validation_task=None if spec.setting in _WITHOUT_LABELS else spec.task,
        split_seed=spec.split_seed,
        is_run=True,
    )
    if coefficients is None:
        return files
    return replace(files, bank=_existing(bank or spec.bank or "", "the bank", "--bank", directory))


def _record(directory: Path) -> Record:
    if not (directory / RECORD).is_file():
        raise InputError(
            "RUN-STATE",
            f"the run in '{printable(directory)}' has not ended: it has no {RECORD}",
            fix="finish it: repeat its command with --resume",
        )
    return read_record(directory / RECORD)


def _spec(directory: Path) -> _RunSpec:
    _record(directory)  # the run has ended
    try:
        return _RunSpec.model_validate(read_yaml(directory / SPEC).data)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        raise InputError(
            "SPEC",
            f"'{printable(directory / SPEC)}' is no spec of a run",
            key=".".join(map(str, first["loc"])),
            reason=first["msg"],
            fix="name the base, with --bank and --coefficients",
        ) from None


def _existing(name: str, what: str, option: str, directory: Path) -> str:
    """Return a name of the spec; raises if it is a path that does not exist any more."""
    if not _exists(name):
        raise InputError(
            "FILE-MISSING",
            f"{what} of the run in '{printable(directory)}' is not at '{printable(name)}'",
            likely="it was moved, or the run was made in another working directory",
            fix=f"{option} PATH",
        )
    return name


def _exists(name: str | None) -> bool:
    """Return False for a path to nothing; hub ids, tags and names of models are not looked up."""
    is_path = name is not None and name.startswith(("/", "./", "../", "~"))
    return not is_path or Path(str(name)).expanduser().exists()


def _name(text: str) -> str:
    return Path(text).name if text.startswith(("/", "~", ".")) else text


# classes


def _with_classes(files: ModelFiles, directory: Path, options: ModelOptions, kind: ItemKind) -> ModelFiles:
    if options.classes:
        usual = TEXT_PROMPTS if kind == "texts" else DEFAULT_PROMPTS
        chosen = ClassList(options.classes, options.prompts or usual)
        return replace(files, classes=chosen, task=None, validation_task=None)
    stored = _stored(files, directory)
    wanted = options.task
    if wanted is None and len(stored) == 1:
        (wanted,) = stored
    elif wanted is None and len(stored) > 1 and files.head is None:
        raise UsageError(
            "DATA-CLASS",
            f"{files.label} was learned for {len(stored)} tasks",
            found=", ".join(map(printable, stored)),
            fix=f"--task {printable(next(iter(stored)))}",
        )
    if wanted in stored:
        known = stored[str(wanted)]
        if options.prompts:
            known = ClassList(known.names, options.prompts, known.descriptions)
        return replace(files, classes=known, task=None)
    if options.task is not None:
        return replace(files, task=options.task, validation_task=None)
    _require_classes(files, directory)
    return files


def _stored(files: ModelFiles, directory: Path) -> dict[str, ClassList]:
    """Return the classes that lie beside the model, by task."""
    for path in (directory / CLASSES, *([files.coefficients.parent / CLASSES] if files.coefficients else ())):
        if path.is_file():
            return read_class_lists(path)
    if files.is_run:
        spec = _spec(directory)
        if spec.classes:
            prompts = spec.prompts or DEFAULT_PROMPTS
            return {"images": ClassList(spec.classes, prompts)}
    return {}


def _require_classes(files: ModelFiles, directory: Path) -> None:
    """Raise if a model that lies here has neither a head nor labels of its own."""
    is_here = files.is_run or directory.is_dir() or files.base == "mini"
    if files.head is None and files.task is None and is_here and not _has_own_labels(directory):
        raise no_classes(files.label)


def _has_own_labels(directory: Path) -> bool:
    try:
        config = json.loads((directory / _CONFIG).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and isinstance(config.get("id2label"), dict)


def no_classes(label: str) -> UsageError:
    """Return the error for a model that can predict any class, and was given none."""
    return UsageError(
        "DATA-CLASS",
        f"the classes that {printable(label)} shall predict are not known",
        expected="classes of a run, of a head, or named ones",
        fix="--classes FILE with a name per line, or --task TASK",
    )
