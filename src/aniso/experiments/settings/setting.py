"""What all settings share: which model and bank, by which method, with which schedule."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from aniso.compose import Partition
from aniso.data import Labelled, Task, Unlabelled
from aniso.errors import InputError, UsageError, printable
from aniso.learn import Best, CrossEntropy, Keep, Last, Objective, Schedule
from aniso.learn.finetune import PAPER
from aniso.learn.lora import Layers
from aniso.learn.schedule import LRSchedule, Optimiser, Precision
from aniso.learn.search import POINTS
from aniso.learn.selection import Budget

Method = Literal["coefficients", "gradient-free", "weights", "search", "vector", "none"]
"""Learn coefficients, by their gradients or from losses alone; fine-tune all weights; search one scale; add
each task's own vector; change nothing."""

COMPOSED = ("coefficients", "gradient-free")
"""Methods that learn coefficients."""

Select = Literal["random", "features", "gradient", "blockwise-gradient", "pursuit"]
"""How vectors are chosen."""

BudgetSaid = Annotated[
    int | str | None, BeforeValidator(lambda x: int(x) if isinstance(x, str) and x.strip().isdigit() else x)
]
"""As ``selection.Budget`` takes it; 5 and "5" are the same."""

LORA = Schedule(epochs=10, lr=1e-3)
"""The paper's recipe for LoRAs."""

Tasks = Callable[[str], Task]
"""Finds a task by what a spec calls it."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ScheduleSpec(Strict):
    """What differs from the setting's own schedule."""

    epochs: int | None = None
    lr: float | None = None
    batch_size: int | None = None
    weight_decay: float | None = None
    warmup_steps: int | None = None
    max_grad_norm: float | None = None
    lr_schedule: LRSchedule | None = None
    min_steps_per_epoch: int | None = None
    precision: Precision | None = None
    micro_batch: int | None = None
    optimiser: Optimiser | None = None


@dataclass(frozen=True)
class Job:
    """What a setting comes to once its tasks are known."""

    tests: Mapping[str, Labelled]
    """Measured at the end, by task."""
    vectors: Callable[[Sequence[str]], Sequence[str]]
    """Which of a bank's vectors are composed."""
    objective: Objective | None
    keep: Keep
    points: Sequence[float] = ()
    """Scales to search through."""
    own_vectors: bool = False
    """Whether every task has a vector of its own, which alone is what results are compared with."""
    unlabelled: Unlabelled | None = None
    """What is learned from without labels, and answered."""
    shots: Labelled | None = None
    """What a head is learned from, if there is one."""
    out_of_domain: Mapping[str, Labelled] = field(default_factory=dict)
    """Other data with the same classes, or some of them, measured with what was learned."""
    notes: tuple[str, ...] = ()


class BaseSetting(Strict, ABC):
    """Everything that decides the result. Devices, workers and places on disk do not."""

    model: str
    weights: str | None = None
    bank: str | None = None
    linearised: bool = False
    method: Method = "coefficients"
    partition: str = "blocks"
    schedule: ScheduleSpec = ScheduleSpec()
    seed: int = Field(default=0, ge=0)
    compare: bool = True
    """Measure the base, too."""

    usual: ClassVar[Schedule]
    """The paper's recipe."""
    usual_weights: ClassVar[Schedule] = PAPER
    """The paper's recipe when all weights are trained."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.needs_bank and self.bank is None:
            raise ValueError(f"method '{self.method}' needs a bank")
        if self.method == "gradient-free" and "evaluations" not in type(self).model_fields:
            raise ValueError("learning without gradients is for few-shot, peft and lm")
        Partition.parse(self.partition)
        self.resolved_schedule()
        return self

    @property
    def rank(self) -> int | None:
        """Of the LoRA that is trained in the place of all weights, if one is."""
        return None

    @property
    def lora_layers(self) -> Layers:
        """Those that the LoRA is for."""
        return "both"

    @property
    def needs_bank(self) -> bool:
        return self.method in (*COMPOSED, "search", "vector")

    @property
    def selection(self) -> tuple[str, Budget] | None:
        """How the bank is made smaller, and to what, if it is."""
        return None

    @property
    def composes_factors(self) -> bool:
        """Whether adapters are composed factor by factor, into one adapter."""
        return False

    @property
    def trains_norms(self) -> bool:
        """Whether layer norms are trained in the place of coefficients."""
        return False

    @property
    def is_online(self) -> bool:
        """Whether pictures are learned from as they come, once, each answered before."""
        return False

    @property
    def head_kind(self) -> str | None:
        """The head that is learned on features, if one is."""
        return None

    @property
    def is_joint(self) -> bool:
        """Whether head and coefficients are learned together."""
        return False

    @property
    def head_view(self) -> str:
        """How a head sees what it learns from."""
        return "eval"

    def headless(self) -> BaseSetting:
        """The same without a head."""
        return self

    def resolved_schedule(self) -> Schedule:
        given = {k: v for k, v in self.schedule.model_dump().items() if v is not None}
        return replace(self.usual_weights if self.method == "weights" else self.usual, **given)

    def resolved_partition(self) -> Partition:
        found = Partition.parse(self.partition)
        return replace(found, seed=self.seed) if found.rule == "random" else found

    def spec(self) -> dict[str, Any]:
        """As a spec says it, with nothing left to be guessed."""
        said = {**self.model_dump(mode="json"), "schedule": asdict(self.resolved_schedule())}
        return {"setting": said.pop("setting"), **said}

    def decisive(self) -> dict[str, Any]:
        """The spec without what cannot change the result, such as a schedule where nothing is learned."""
        out = self.spec()
        if self.method not in ("coefficients", "weights"):
            del out["schedule"]
        if self.method not in COMPOSED:
            del out["partition"]
        return out

    @property
    def id(self) -> str:
        """A hash that changes with anything that decides the result, and with nothing else."""
        return hashlib.sha256(json.dumps(self.decisive(), sort_keys=True).encode()).hexdigest()


class PictureSetting(BaseSetting, ABC):
    """Settings about tasks, whose pictures belong to classes."""

    split_seed: int = Field(default=0, ge=0)
    on_bad_image: Literal["error", "skip"] | int = "error"

    @abstractmethod
    def job(self, tasks: Tasks) -> Job: ...


class Adapts(BaseSetting, ABC):
    """Settings that learn something new, with vectors of other things or without."""

    leave_out: tuple[str, ...] = Field(default=(), strict=False)
    select: Select | None = None
    """How vectors, or cells of them, are chosen before anything is learned; all are taken if not said."""
    budget: BudgetSaid = None
    """Vectors, or cells of each block, that are kept; or bytes, such as 200MB."""

    lora: int | None = Field(default=None, ge=1)
    """With method weights: the rank of a LoRA that is trained in the place of all weights."""
    factors: bool = False
    """Coefficients for the factors A and B of adapters, each its own, as in the paper's runs with LoRAs."""
    evaluations: int = Field(default=500, ge=1)
    """Gradient-free: passes over the data that are tried."""
    parallel: int = Field(default=1, ge=1)
    """Gradient-free: tries that are made at once, each by a thread of its own."""

    @model_validator(mode="after")
    def _chooses(self) -> Self:
        if self.lora is not None and (self.method != "weights" or self.linearised):
            raise ValueError("a LoRA is trained with method weights, on the model itself")
        if self.factors and (self.method != "coefficients" or self.partition != "blocks" or self.linearised):
            raise ValueError("factors have a coefficient each: method coefficients, partition blocks")
        return chooses(self, self.select, self.budget)

    @property
    def rank(self) -> int | None:
        return self.lora

    def resolved_schedule(self) -> Schedule:
        found = super().resolved_schedule()
        said = self.schedule.lr is not None or self.lora is None
        return found if said else replace(found, lr=LORA.lr)

    @property
    def composes_factors(self) -> bool:
        return self.factors

    @property
    def selection(self) -> tuple[str, Budget] | None:
        return selected(self.select, self.budget)


class OneTask(Adapts, PictureSetting, ABC):
    """Settings that learn a task from some of its own pictures."""

    task: str
    keep: Literal["last", "best"] = "last"
    """best chooses the epoch on the validation split, as the paper's tables do."""
    view: Literal["few_shot", "train", "eval"] = "few_shot"
    """few_shot crops and mirrors; train crops a little, for digits, letters and the like."""

    usual: ClassVar[Schedule] = Schedule(epochs=10, lr=1e-1, warmup_steps=0, min_steps_per_epoch=10)


S = TypeVar("S", bound=BaseSetting)


def chooses(setting: S, select: str | None, budget: int | str | None) -> S:
    """A choice needs a rule and a budget, and something that is composed."""
    if (select is None) != (budget is None):
        raise ValueError("select and budget go together: how vectors are chosen, and how many")
    if budget is not None:
        Budget.of(budget)
        if not setting.needs_bank or setting.method == "vector":
            raise ValueError(f"there is nothing to select for method '{setting.method}'")
    return setting


def selected(select: str | None, budget: int | str | None) -> tuple[str, Budget] | None:
    return None if select is None or budget is None else (select, Budget.of(budget))


def others(present: Sequence[str], own: str, leave_out: Sequence[str]) -> list[str]:
    """A bank's vectors without a task's own and those to leave out, which must be there."""
    # a folder MNIST is the task that a vector mnist was made from: its own vector would give the answer away
    out = {_plain(own), *map(_plain, leave_out)}
    unknown = [name for name in leave_out if name not in present and name != own]
    if unknown:
        raise UsageError(
            "BANK-NAME",
            f"the bank has no vector '{printable(unknown[0])}' to leave out",
            expected=", ".join(present),
            fix="correct the name, or do not leave it out",
        )
    return [name for name in present if _plain(name) not in out]


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", "", name).casefold()


def one_task(setting: OneTask, task: Task, part: Labelled, *notes: str) -> Job:
    """A task learned from a part of its training pictures, without its own vector."""
    chosen = setting.keep == "best" or setting.method == "search"
    return Job(
        tests=tested(task, setting.method),
        vectors=lambda names: others(names, task.name, setting.leave_out),
        objective=CrossEntropy(part, view=setting.view) * 1.0,
        keep=Best(require_split(task, "val", "epochs are chosen by")) if chosen else Last(),
        points=POINTS,
        notes=(*task.notes, *notes),
    )


def tested(task: Task, method: Method) -> dict[str, Labelled]:
    """What results are measured on; a task without a test split can be learned all the same."""
    if "test" not in task.splits and method in (*COMPOSED, "weights", "search"):
        return {}
    return {task.name: require_split(task, "test", "results are measured on")}


def require_split(task: Task, role: str, why: str) -> Labelled:
    found = task.splits.get(role)
    if found is None:
        raise InputError(
            "DATA-SPLIT",
            f"{printable(task.name)} has no {role} split, which {why}",
            found=", ".join(task.splits),
            fix=f"add one, or choose another way: aniso task show '{printable(task.name)}'",
        )
    return found
