"""Language models: composing adapters so that a model predicts texts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, final

from aniso.experiments.options import option
from aniso.experiments.settings.adapting import AdaptingSetting
from aniso.experiments.settings.setting import MERGES
from aniso.registry import SETTINGS
from aniso.schedule import Schedule

if TYPE_CHECKING:
    from aniso.data import TextDataset
    from aniso.experiments.content import Content
    from aniso.experiments.problem import Problem
    from aniso.experiments.session import Session
    from aniso.models import LanguageModel
    from aniso.records import Inputs

_IMAGES = "it needs classification tasks: coefficients, gradient-free, weights or none"


@final
@SETTINGS.register("lm")
class Language(AdaptingSetting):
    """Compose adapters of a language model so that it predicts your texts: a file of examples."""

    train: str = option(
        help="Texts to learn from: JSON lines of prompt and completion, or of text; or a plain text.",
        group="Task",
    )
    val: str | None = option(
        None, help="Texts that choose the epoch; the last is kept without them.", group="Task"
    )
    test: str | None = option(None, help="Texts that the result is evaluated on.", group="Task")
    length: int | None = option(
        None, help="Longest text in tokens; default: 512, or the model's limit if lower.", group="Task", ge=2
    )

    excluded = dict.fromkeys(("search", "vector", "layernorm", "setfit"), _IMAGES) | MERGES
    excluded_rules: ClassVar[Mapping[str, str]] = {
        "features": "texts have no image features to select by: blockwise-gradient, say"
    }

    @property
    def schedule(self) -> Schedule:
        return Schedule(epochs=10, lr=5e-2, batch_size=16, warmup_steps=0, min_steps_per_epoch=10)

    @property
    def fine_tuning_schedule(self) -> Schedule:
        return Schedule(epochs=10, lr=1e-5, batch_size=16, warmup_steps=0)

    def load_model(self) -> LanguageModel:
        from aniso.models import load_language_model

        return load_language_model(self.model, self.weights)

    @property
    def _files(self) -> dict[str, str]:
        """Files by what they are for."""
        given = {"train": self.train, "val": self.val, "test": self.test}
        return {role: name for role, name in given.items() if name is not None}

    def input_files(self) -> dict[str, str]:
        return {**super().input_files(), **self._files}

    def problem(self, session: Session) -> Problem:
        from aniso.experiments.evaluation import LanguageEvaluation
        from aniso.experiments.problem import Problem, other_vectors
        from aniso.learn import Best, LanguageLoss, Last

        texts = {role: self._read(session, name, role) for role, name in self._files.items()}
        evaluation = LanguageEvaluation(texts)
        return Problem(
            objective=LanguageLoss(texts["train"]) * 1.0,
            keep=Best(texts["val"]) if "val" in texts else Last(),
            evaluation=evaluation,
            vectors=lambda names: other_vectors(names, "", self.leave_out, self.only),
        )

    def _read(self, session: Session, name: str, role: str) -> TextDataset:
        from aniso.data import read_examples
        from aniso.learn import text_dataset

        path = session.path(name)
        # two files may have the same name
        return text_dataset(
            session.language_model, read_examples(path), f"{path.name} {role}", role, length=self.length
        )

    def content(self, session: Session) -> Content:
        from aniso.experiments.content import Content

        learned = [name for role, name in self._files.items() if role != "test" and self.method.minimises]
        measured = () if self.test is None else (session.path(self.test),)
        return Content(tuple(session.path(name) for name in learned), measured)

    def inputs(self, session: Session) -> Inputs:
        from aniso.records import Inputs

        data, _ = session.problem.evaluation.identity()
        return Inputs.model_validate({**session.model.identity(), "data": data})

    def public_names(self, session: Session) -> dict[str, str]:
        return {name: f"{Path(name).name} {role}" for role, name in self._files.items()}
