"""Making a task vector: the image encoder, or a LoRA of it, trained on all of a task."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from aniso.data.card import known_card, known_tasks
from aniso.experiments.settings.setting import BaseSetting, Job, Method, Tasks, require_split, tested
from aniso.learn import CrossEntropy, Last, Schedule

_LORA = Schedule(epochs=10, lr=1e-3)


class FineTune(BaseSetting):
    """The paper's recipe; for known data sets with the paper's number of epochs."""

    setting: Literal["finetune"] = "finetune"
    task: str
    method: Method = "weights"
    lora: int | None = Field(default=None, ge=1)
    """The rank, if adapters are to be trained."""

    usual: ClassVar[Schedule] = BaseSetting.usual_weights

    @model_validator(mode="after")
    def _trains_weights(self) -> Self:
        if self.method != "weights":
            raise ValueError("fine-tuning trains weights: leave method out")
        if self.lora is not None and self.linearised:
            raise ValueError("a LoRA is trained on the model itself, not on its linearisation")
        return self

    @property
    def rank(self) -> int | None:
        return self.lora

    def resolved_schedule(self) -> Schedule:
        usual = _LORA if self.lora is not None else self.usual
        epochs = known_card(self.task).epochs if self.task in known_tasks() else None
        given = {k: v for k, v in self.schedule.model_dump().items() if v is not None}
        return replace(usual, **({"epochs": epochs} if epochs else {}) | given)

    def job(self, tasks: Tasks) -> Job:
        task = tasks(self.task)
        return Job(
            tests=tested(task, self.method),
            vectors=lambda names: (),
            objective=CrossEntropy(require_split(task, "train", "vectors are made from")) * 1.0,
            keep=Last(),
            notes=task.notes,
        )
