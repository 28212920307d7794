"""Task negation: a task taken out of a model, while the rest stays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, final

from aniso.experiments.methods.method import recipe_notes
from aniso.experiments.options import option
from aniso.experiments.settings.image_setting import ImageSetting
from aniso.registry import SETTINGS
from aniso.schedule import Schedule

if TYPE_CHECKING:
    from aniso.experiments.problem import Problem
    from aniso.experiments.session import Session

_PAPER = {  # learning rate and epochs
    "cars": (5e-3, 20),
    "dtd": (1e-2, 20),
    "eurosat": (5e-3, 3),
    "gtsrb": (5e-3, 5),
    "mnist": (3e-3, 7),
    "resisc45": (2e-3, 10),
    "sun397": (3e-3, 10),
    "svhn": (5e-3, 2),
}
_OTHER_TASKS = (5e-3, 10)


@final
@SETTINGS.register("negation")
class Negation(ImageSetting):
    """Take a task out of a model while a control task stays."""

    target: str = option(help="The task to take out, named like its vector.", group="Task")
    control: str = option(help="The task to keep.", group="Task")
    floor: float = option(
        0.95,
        help="Share of its zero-shot accuracy that the control keeps, on validation data.",
        group="Task",
        ge=0,
        le=1,
    )

    excluded: ClassVar[Mapping[str, str]] = {
        **ImageSetting.excluded,
        "vector": "adding the target's vector does not take it out: search, or learn coefficients",
    }

    @property
    def schedule(self) -> Schedule:
        lr, epochs = _PAPER.get(self._known_target or "", _OTHER_TASKS)
        return Schedule(epochs=epochs, lr=lr, warmup_steps=0, lr_schedule="constant", epoch_of="target")

    @property
    def _known_target(self) -> str | None:
        from aniso.data.card import known_name

        found = known_name(self.target)
        return found if found in _PAPER else None

    def input_files(self) -> dict[str, str]:
        return {**super().input_files(), "target": self.target, "control": self.control}

    def problem(self, session: Session) -> Problem:
        from aniso.experiments.evaluation import LabelledEvaluation
        from aniso.experiments.problem import Problem, require_split
        from aniso.learn import CrossEntropy, Lowest
        from aniso.learn.search import POINTS

        target, control = session.task(self.target), session.task(self.control)
        val = [require_split(task, "val", "coefficients are learned on") for task in (target, control)]
        test = {t.name: require_split(t, "test", "results are measured on") for t in (target, control)}
        return Problem(
            objective=CrossEntropy(val[1]) - CrossEntropy(val[0]),
            # a search tries all its scales; training that has once gone too far does not return
            keep=Lowest(val[0], val[1], self.floor, stop=self.method.minimises),
            evaluation=LabelledEvaluation(test),
            vectors=lambda present: [name for name in (target.name,) if name in present],
            scales=tuple(0.0 - point for point in POINTS),
            notes=(*target.notes, *control.notes, *recipe_notes(self, self._known_target, "epochs", "lr")),
        )
