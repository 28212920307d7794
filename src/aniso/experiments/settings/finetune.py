"""Making a task vector: the image encoder, or a LoRA of it, trained on all of a task."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from aniso.data.card import known_card, known_tasks
from aniso.experiments.settings.setting import (
    LORA,
    Job,
    Method,
    PictureSetting,
    Tasks,
    require_split,
    tested,
)
from aniso.learn import CrossEntropy, Last, Schedule
from aniso.learn.lora import Layers


class FineTune(PictureSetting):
    """The paper's recipe; for known data sets with the paper's number of epochs."""

    setting: Literal["finetune"] = "finetune"
    task: str
    method: Method = "weights"
    lora: int | None = Field(default=None, ge=1)
    """The rank, if adapters are to be trained."""
    targets: Layers = "both"
    """Layers that adapters are trained for."""

    usual: ClassVar[Schedule] = PictureSetting.usual_weights

    @model_validator(mode="after")
    def _trains_weights(self) -> Self:
        if self.method != "weights":
            raise ValueError("fine-tuning trains weights: leave method out")
        if self.lora is not None and self.linearised:
            raise ValueError("a LoRA is trained on the model itself, not on its linearisation")
        if self.targets != "both" and self.lora is None:
            raise ValueError("targets are a LoRA's: add lora, its rank")
        return self

    @property
    def rank(self) -> int | None:
        return self.lora

    @property
    def lora_layers(self) -> Layers:
        return self.targets

    def resolved_schedule(self) -> Schedule:
        usual = LORA if self.lora is not None else self.usual
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
