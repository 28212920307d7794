"""Fine-tuning on a task, to make a task vector of the result."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, final

from aniso.experiments.methods.method import Method, recipe_notes
from aniso.experiments.options import option
from aniso.experiments.settings.adapting import test_splits
from aniso.experiments.settings.image_setting import ImageSetting
from aniso.experiments.settings.setting import FINE_TUNING
from aniso.registry import SETTINGS
from aniso.schedule import Schedule

if TYPE_CHECKING:
    from aniso.experiments.problem import Problem
    from aniso.experiments.session import Session


@final
@SETTINGS.register("finetune")
class FineTune(ImageSetting):
    """Fine-tune a model on a task, to make a task vector: all weights, or a LoRA adapter."""

    task: str = option(help="Task: a known name, a folder with a directory per class, a table.", group="Task")
    method: Method = option(
        "weights",
        help="What is trained.",
        group="Method",
        choices=lambda: ("weights",),
        validate_default=True,
    )

    @classmethod
    def methods(cls) -> tuple[str, ...]:
        return ("weights",)

    @property
    def schedule(self) -> Schedule:
        return self.fine_tuning_schedule

    @property
    def fine_tuning_schedule(self) -> Schedule:
        """The paper's recipe; for known data sets with the paper's number of epochs."""
        epochs = _paper_epochs(self._known_task)
        return replace(FINE_TUNING, epochs=epochs) if epochs else FINE_TUNING

    @property
    def _known_task(self) -> str | None:
        from aniso.data.card import known_name

        found = known_name(self.task)
        return found if _paper_epochs(found) else None

    def input_files(self) -> dict[str, str]:
        return {**super().input_files(), "task": self.task}

    def problem(self, session: Session) -> Problem:
        from aniso.experiments.evaluation import LabelledEvaluation
        from aniso.experiments.problem import Problem, require_split
        from aniso.learn import CrossEntropy, Last

        task = session.task(self.task)
        return Problem(
            objective=CrossEntropy(require_split(task, "train", "vectors are made from")) * 1.0,
            keep=Last(),
            evaluation=LabelledEvaluation(test_splits(task, self)),
            vectors=lambda names: (),
            notes=(*task.notes, *recipe_notes(self, self._known_task, "epochs")),
        )


def _paper_epochs(name: str | None) -> int | None:
    from aniso.data.card import known_card

    return None if name is None else known_card(name).epochs
