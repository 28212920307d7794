"""One record: what a run was asked to do and what came out, as its JSON file says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from aniso.errors import InputError, UsageError, printable

_LARGEST = 64 << 20
_FAILED = ".failed.json"
_ROUNDING = 1e-3  # of accuracies written with few digits

Setting = Literal["few-shot", "peft", "addition", "negation", "finetune", "test-time", "lm"]
Method = Literal["none", "vector", "search", "weights", "coefficients", "gradient-free"]
Share = Annotated[float, Field(ge=0, le=1)]
FiveNumbers = tuple[float, float, float, float, float]


class _Part(BaseModel):
    """What is read is checked; what a later version adds is kept, so that no two records look alike."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)


class Score(_Part):
    """Right answers on one task; bit i of ``right`` says whether picture i was among them."""

    correct: Annotated[int, Field(ge=0)]
    total: Annotated[int, Field(ge=1)]
    accuracy: Share
    per_class_accuracy: Share | None = None
    interval: tuple[Share, Share] | None = None
    right: Annotated[str, Field(pattern=r"^[0-9a-fA-F]+$")] | None = None

    @model_validator(mode="after")
    def _adds_up(self) -> Score:
        if abs(self.accuracy - self.correct / self.total) > _ROUNDING:
            raise ValueError(f"{self.correct} of {self.total} is not {self.accuracy}")
        if self.right is not None:
            answers = int(self.right, 16)
            if answers.bit_length() > self.total or answers.bit_count() != self.correct:
                raise ValueError(f"right does not name {self.correct} of {self.total} pictures")
        return self


class Metrics(_Part):
    accuracy: dict[str, Score] = Field(default_factory=dict)
    zero_shot: dict[str, Share] = Field(default_factory=dict)
    reference: dict[str, Share] | None = None
    out_of_domain: dict[str, Score] = Field(default_factory=dict)
    online: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Of an online run: what was right of the answers given on the way."""
    answers: dict[str, Any] = Field(default_factory=dict)
    """Of a run without labels: how often answers are those of zero-shot, how sure they are, their counts."""
    perplexity: dict[str, Annotated[float, Field(ge=1)]] = Field(default_factory=dict)
    """Of texts."""
    base_perplexity: dict[str, Annotated[float, Field(ge=1)]] = Field(default_factory=dict)
    kept_epoch: int | None = None
    epochs: int | None = None
    trainable: int | None = None
    history: tuple[dict[str, Any], ...] = ()


class Spec(_Part):
    """What the run was asked to do."""

    setting: Setting
    model: str
    method: Method
    bank: str | None = None
    linearised: bool = False
    partition: Any = None
    task: str | None = None
    tasks: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    target: str | None = None
    control: str | None = None
    shots: Annotated[int, Field(ge=0)] | None = None
    fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None
    train: str | None = None
    """Texts that were learned from; at test time what was trained."""
    test: str | None = None
    """Texts."""
    head: str | None = None
    joint: bool = False
    select: str | None = None
    budget: int | str | None = None
    # as they were before they could be said
    evaluations: int = 500
    factors: bool = False

    @property
    def unchanged(self) -> bool:
        """Whether the run measures the base as it is, which no number of pictures changes."""
        return self.method == "none" and self.head is None

    @property
    def measured(self) -> tuple[str, ...]:
        """The tasks whose accuracy the run is about."""
        if self.setting == "addition":
            return self.tasks or ()
        if self.setting == "lm":
            return (self.test,) if self.test is not None else ()
        names = (self.target, self.control) if self.setting == "negation" else (self.task,)
        return tuple(name for name in names if name is not None)

    @model_validator(mode="after")
    def _is_complete(self) -> Spec:
        needed = {
            "few-shot": ("task", "shots"),
            "peft": ("task", "fraction"),
            "addition": ("tasks",),
            "negation": ("target", "control"),
            "finetune": ("task",),
            "lm": ("train",),
            "test-time": (),  # pictures of one's own have no task, and no accuracy
        }[self.setting]
        free = ("shots", "fraction") if self.unchanged else ()
        for name in needed:
            if getattr(self, name) in (None, 0) and name not in free:
                raise ValueError(f"a {self.setting} run needs {name}")
        return self


class Summary(_Part):
    """Least, quartiles and greatest of a run's coefficients, by kind of block and by depth."""

    kind: dict[str, FiveNumbers] = Field(default_factory=dict)
    depth: dict[str, FiveNumbers] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_sorted(self) -> Summary:
        for name, numbers in (*self.kind.items(), *self.depth.items()):
            if list(numbers) != sorted(numbers):
                raise ValueError(f"the five numbers of {printable(name)} are not in order")
        return self


class Inputs(_Part):
    model: str | None = None
    bank: str | None = None
    data: dict[str, str] = Field(default_factory=dict)


class Record(_Part):
    """One cell of an experiment."""

    schema_: Literal[1] = Field(alias="schema")
    id: Annotated[str, Field(min_length=1)]
    experiment: str
    label: str
    spec: Spec
    metrics: Metrics = Field(default_factory=Metrics)
    coefficients: Summary | None = None
    inputs: Inputs = Field(default_factory=Inputs)
    versions: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, Any] = Field(default_factory=dict)
    seconds: Annotated[float, Field(ge=0)] | None = None
    peak_memory_bytes: Annotated[int, Field(ge=0)] | None = None
    notes: tuple[str, ...] = ()
    status: str = "ok"

    @model_validator(mode="after")
    def _measured_what_it_should(self) -> Record:
        missing = [name for name in self.spec.measured if name not in self.metrics.accuracy]
        if self.ended_well and missing:
            raise ValueError(f"no accuracy of {', '.join(map(printable, missing))}")
        return self

    @property
    def ended_well(self) -> bool:
        return self.status == "ok"

    @property
    def seed(self) -> int:
        return self.spec.seed or 0

    def accuracy(self, task: str) -> float:
        return self.metrics.accuracy[task].accuracy


def read_records(paths: Sequence[Path]) -> list[Record]:
    """Every record of these files and of all JSON files under these directories; copies count once."""
    read: dict[tuple[str, str], tuple[Path, Record]] = {}
    for path in _files(paths):
        record = _read(path)
        # experiments may have a run in common, such as zero-shot
        first, known = read.setdefault((record.experiment, record.id), (path, record))
        if known != record:
            raise InputError(
                "RECORD",
                "two records of the same run differ",
                found=[printable(first), printable(path)],
                differs=", ".join(_differences(known, record)),
                fix="report on one of the two",
            )
    return [record for _, record in read.values()]


def _differences(a: Record, b: Record) -> list[str]:
    ours, theirs = a.model_dump(), b.model_dump()
    return [printable(name) for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in map(Path, paths):
        if path.is_dir():
            yield from sorted(p for p in path.rglob("*.json") if p.is_file() and not _beside(p, path))
        elif path.is_file():
            yield path
        else:
            raise _bad(path, "no such file" if not path.exists() else "neither a file nor a directory")


def failed_cells(paths: Sequence[Path]) -> int:
    """How many cells below these directories failed, and so have no record."""
    return sum(1 for path in map(Path, paths) if path.is_dir() for _ in path.rglob(f"*{_FAILED}"))


def _beside(path: Path, root: Path) -> bool:
    """What runs leave beside records: reasons of failures, adapters, states."""
    words = path.relative_to(root).parts
    hidden = any(word.startswith(".") for word in words)
    return hidden or path.name.endswith(_FAILED) or path.name in ("failure.json", "adapter_config.json")


def _read(path: Path) -> Record:
    try:
        if path.stat().st_size > _LARGEST:
            raise _bad(path, f"{path.stat().st_size:,} bytes")
        return Record.model_validate_json(path.read_bytes())
    except OSError as e:
        raise _bad(path, e.strerror or str(e)) from None
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        place = ".".join(str(word) for word in first["loc"])
        raise _bad(path, f"{place}: {first['msg']}" if place else first["msg"]) from None


def _bad(path: Path, found: str) -> InputError:
    return InputError(
        "RECORD",
        f"'{printable(path)}' is no record of an experiment",
        found=found,
        expected="a JSON file of schema 1, as experiments write it",
        fix="name only files and directories of records",
    )


def experiments(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by experiment; one that has several settings counts as several experiments."""
    settings: dict[str, set[str]] = defaultdict(set)
    records = list(records)
    for record in records:
        settings[record.experiment].add(record.spec.setting)
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        several = len(settings[record.experiment]) > 1
        name = f"{record.experiment}, {record.spec.setting}" if several else record.experiment
        groups[name].append(record)
    return dict(sorted(groups.items()))


def require_one_experiment(records: Iterable[Record]) -> list[Record]:
    """The records, if a single table can hold them."""
    records = list(records)
    found = list(experiments(records))
    if not found:
        raise UsageError("RECORD", "there is nothing to report", fix="run an experiment first")
    if len(found) > 1:
        raise UsageError(
            "RECORD",
            "a table holds one experiment",
            found=", ".join(found),
            fix="one table for each group of experiments(records)",
        )
    return records


def mixed(records: Iterable[Record]) -> list[str]:
    """Where runs of one experiment were not made from the same model or the same pictures."""
    notes = []
    for name, group in experiments(records).items():
        models = {r.inputs.model for r in group if r.inputs.model is not None}
        if len(models) > 1:
            notes.append(f"{name}: mixes runs of {len(models)} different models ({_short(models)})")
        data: dict[str, set[str]] = defaultdict(set)
        for record in group:
            for task, manifest in record.inputs.data.items():
                data[task].add(manifest)
        notes += [
            f"{name}: mixes runs on {len(found)} different sets of pictures of {task} ({_short(found)})"
            for task, found in sorted(data.items())
            if len(found) > 1
        ]
        banks: dict[tuple[str, ...], set[str]] = defaultdict(set)
        for r in group:
            # what was chosen, or drawn by the seed, may well differ
            given = r.spec.select is None and not (r.spec.bank or "").startswith("random:")
            if given and r.spec.bank is not None and r.inputs.bank is not None:
                left_out = str(r.spec.model_dump().get("leave_out"))
                banks[r.spec.bank, r.spec.method, *r.spec.measured, left_out].add(r.inputs.bank)
        changed = sorted({key[0] for key, hashes in banks.items() if len(hashes) > 1})
        notes += [f"{name}: mixes runs with different contents of bank {bank}" for bank in changed]
    return notes


def _short(hashes: Iterable[str]) -> str:
    return ", ".join(sorted(text[:12] for text in hashes))
