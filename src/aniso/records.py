"""Records: what a run was asked to do, from what, and what came out. Written by runs, read by reports."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from aniso.coefficient_matrix import CoefficientMatrix
from aniso.errors import printable
from aniso.json_value import JsonObject
from aniso.json_value import JsonValue as JsonValue
from aniso.registry import SETTINGS

SCHEMA = 1
_MOST = 10**12  # images of a task: more cannot be divided by as numbers
_ROUNDING = 1e-3  # of accuracies written with few digits

Name = Annotated[str, Field(min_length=1)]
"""Of a setting or a method: another package may register its own, so any name is one."""
NEEDED: Final[dict[str, tuple[str, ...]]] = {
    "few-shot": ("task", "shots"),
    "data-fraction": ("task", "fraction"),
    "addition": ("tasks",),
    "negation": ("target", "control"),
    "finetune": ("task",),
    "lm": ("train",),
    "test-time": (),  # a user's own images have no task, and no accuracy
}
"""The fields of a spec that each of aniso's own settings needs; other settings are not checked."""
Share = Annotated[float, Field(ge=0, le=1)]
Supervision = Literal["none", "unlabelled", "labelled"]
FiveNumbers = tuple[float, float, float, float, float]


class _Part(BaseModel):
    """What is read is checked; what a later version adds is kept, so that no two records look alike."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    def content(self) -> JsonObject:
        """Return what was set, as plain JSON values."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def with_values(self, **values: Any) -> Self:
        """Return the same with other values."""
        return self.model_copy(update=values)


class Score(_Part):
    """Accuracy on one task; bit i of ``right`` is set if image i was classified correctly."""

    correct: Annotated[int, Field(ge=0, le=_MOST)]
    total: Annotated[int, Field(ge=1, le=_MOST)]
    accuracy: Share
    per_class_accuracy: Share | None = None
    interval: tuple[Share, Share] | None = None
    right: Annotated[str, Field(pattern=r"^[0-9a-fA-F]+$")] | None = None

    @model_validator(mode="after")
    def _adds_up(self) -> Score:
        if abs(self.accuracy - self.correct / self.total) > _ROUNDING:
            raise ValueError(f"{self.correct} of {self.total} is not {self.accuracy}")
        if self.right is not None:
            images = int(self.right, 16)
            if images.bit_length() > self.total or images.bit_count() != self.correct:
                raise ValueError(f"right does not name {self.correct} of {self.total} images")
        return self


class EpochRow(_Part):
    """One row of a history: an epoch of ``fit``, a look of a gradient-free run, or a scale of a search.

    Fields that do not apply to a row are None or empty; those that were not set are left out of its JSON.
    """

    epoch: int | None = None
    """Number of complete epochs, or of the look; 0 is the start, before any step."""
    round: int | None = None
    """Learning in rounds: the number of the round, from 1 on."""
    step: int | None = None
    """Steps of the run so far, where epochs are validated within or cut short."""
    loss: float | None = None
    """Weighted sum of ``terms``, as a mean over the epoch; None at the start."""
    terms: dict[str, float] = Field(default_factory=dict)
    """Mean loss of every term of the objective, by the term's name."""
    accuracy: dict[str, float] = Field(default_factory=dict)
    """Accuracy on the keep rule's splits, by the split's name."""
    agreement: dict[str, float] = Field(default_factory=dict)
    """Share of predictions that are those of the teacher, by the name of the unlabelled split."""
    perplexity: dict[str, float] = Field(default_factory=dict)
    kept: bool = False
    """True for the row whose values are kept so far."""
    trusted: int | None = None
    """FixMatch: number of trusted images in this epoch."""
    forgotten: int | None = None
    """SAR: how often the parameters were reset to their start so far, because predictions collapsed."""
    scale: float | None = None
    """Search: the scale of all task vectors."""
    evaluations: int | None = None
    """Gradient-free: number of loss evaluations so far."""


class OnlineScore(_Part):
    """Predictions of an online run, made before learning: a score, or counts where there are no labels."""

    accuracy: Share | None = None
    counts: dict[str, int] = Field(default_factory=dict)


class PredictionSummary(_Part):
    """Predictions without labels, compared with zero-shot ones."""

    agreement: Share
    """Share of predictions that are the zero-shot ones."""
    confidence: tuple[float, float] | None = None
    """Mean confidence before and after."""
    counts: dict[str, int] = Field(default_factory=dict)
    """Predictions of each class."""


class HeadSummary(_Part):
    """A head that was learned: its size, and the step that was kept."""

    kind: str
    trainable: int
    steps: int | None = None
    kept_step: int | None = None
    loss: tuple[float, float] | None = None
    """In the first and the last step."""


class SelectionSummary(_Part):
    """Vectors, or cells of them, that a selection rule chose."""

    strategy: str
    budget: str
    vectors: dict[str, int]
    """Blocks that are kept of every vector."""
    cells: int
    bytes: int


class Metrics(_Part):
    """What came out: accuracies, and how the result was reached."""

    accuracy: dict[str, Score] = Field(default_factory=dict)
    zero_shot: dict[str, Share] = Field(default_factory=dict)
    head_alone: dict[str, Share] = Field(default_factory=dict)
    """Accuracy of the same head on features of the base."""
    without_head: dict[str, Share] = Field(default_factory=dict)
    """Accuracy of what was learned, with class weights in place of the head."""
    reference: dict[str, Share] | None = None
    out_of_domain: dict[str, Score] = Field(default_factory=dict)
    online: dict[str, OnlineScore] = Field(default_factory=dict)
    answers: PredictionSummary | None = None
    perplexity: dict[str, Annotated[float, Field(ge=1)]] = Field(default_factory=dict)
    """Of texts."""
    base_perplexity: dict[str, Annotated[float, Field(ge=1)]] = Field(default_factory=dict)
    kept_epoch: int | None = None
    epochs: int | None = None
    trainable: int | None = None
    learning_rate: float | None = None
    """Of training: the highest one, after restarts."""
    kept_look: int | None = None
    """Of gradient-free runs: the look that was kept."""
    evaluations: int | None = None
    scale: float | None = None
    """Of searches."""
    supervision: Supervision | None = None
    """What the task's data decided the result by: nothing, items without labels, or labels."""
    head: HeadSummary | None = None
    selection: SelectionSummary | None = None
    history: tuple[EpochRow, ...] = ()

    def merged(self, other: Metrics) -> Metrics:
        """Return these metrics with everything that was set in others."""
        return self.model_copy(update={name: getattr(other, name) for name in other.model_fields_set})


class Spec(_Part):
    """The options of the run that tables and reports use; further fields are kept as they are."""

    setting: Name
    model: str
    method: Name
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
    # defaults of records written before these were options
    evaluations: int = 500
    factors: bool = False
    match: str = "kl"
    choose_by: str | None = None
    inputs_from: str = "val"
    calibrate: str | None = None
    calibrate_items: int = 64
    rounds: int = 1

    @field_validator("setting", mode="before")
    @classmethod
    def _todays_name(cls, value: object) -> object:
        return SETTINGS.canonical(value) if isinstance(value, str) else value

    @property
    def unchanged(self) -> bool:
        """True if the run evaluates the base itself, which does not depend on the number of images."""
        return self.method == "none" and self.head is None

    @property
    def measured(self) -> tuple[str, ...]:
        """The tasks whose accuracy a run of this setting must state; none for settings of other packages."""
        if self.setting == "addition":
            return self.tasks or ()
        if self.setting == "lm":
            return (self.test,) if self.test is not None else ()
        if self.setting not in NEEDED:
            return ()
        names = (self.target, self.control) if self.setting == "negation" else (self.task,)
        return tuple(name for name in names if name is not None)

    @model_validator(mode="after")
    def _is_complete(self) -> Spec:
        free = ("shots", "fraction") if self.unchanged else ()
        for name in NEEDED.get(self.setting, ()):
            if getattr(self, name) in (None, 0) and name not in free:
                raise ValueError(f"a {self.setting} run needs {name}")
        return self


class Summary(_Part):
    """A run's coefficients: least, quartiles and greatest by kind of block and by depth, and all of them."""

    sha256: str | None = None
    """A hash of the coefficients, which their file, cards and heads name, too; None in older records."""
    kind: dict[str, FiveNumbers] = Field(default_factory=dict)
    depth: dict[str, FiveNumbers] = Field(default_factory=dict)
    matrix: CoefficientMatrix | None = None
    """None in records of earlier versions, and where ``omitted`` says why."""
    omitted: str = ""

    @model_validator(mode="after")
    def _is_sorted(self) -> Summary:
        for name, numbers in (*self.kind.items(), *self.depth.items()):
            if list(numbers) != sorted(numbers):
                raise ValueError(f"the five numbers of {printable(name)} are not in order")
        return self


class StartSummary(_Part):
    """The coefficients that learning started at: a hash of them, and how they were made."""

    sha256: str
    description: str


class Inputs(_Part):
    """Hashes of what a run was made from."""

    model: str | None = None
    bank: str | None = None
    """Of the whole bank; in records of earlier versions of the vectors that were used."""
    selected: str | None = None
    """Of the vectors and blocks of the bank that were used."""
    data: dict[str, str] = Field(default_factory=dict)
    """For every task, of names and labels."""
    classes: dict[str, str] = Field(default_factory=dict)
    class_names: dict[str, tuple[str, ...]] | None = None
    """For every task, in records of run directories."""
    vectors: tuple[str, ...] = ()
    merged: dict[str, str] = Field(default_factory=dict)
    """Of vectors that the run merged itself: rule, options and sources."""
    start: StartSummary | None = None
    """What learning started at; None for zero."""
    content_hashes: dict[str, dict[str, str]] | None = Field(default=None, alias="content")
    """For every split that was learned from or measured on, of its images or texts; None in older records."""


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
    versions: dict[str, str] = Field(default_factory=dict)
    environment: dict[str, str | int] = Field(default_factory=dict)
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

    @property
    def measured(self) -> tuple[str, ...]:
        """The tasks the run is about; for settings of other packages, all tasks with an accuracy."""
        return self.spec.measured if self.spec.setting in NEEDED else tuple(self.metrics.accuracy)

    def accuracy(self, task: str) -> float:
        return self.metrics.accuracy[task].accuracy


def rounded(value: Any) -> Any:
    """The value with all floats in it rounded to six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value
