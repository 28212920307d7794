"""Texts: a language model learns from examples, with adapters of other things to compose."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from aniso.experiments.settings.setting import Adapts
from aniso.learn import Schedule


class Language(Adapts):
    """What makes the training texts likeliest; epochs are chosen by other texts, if there are any."""

    setting: Literal["lm"] = "lm"
    train: str
    """A file of JSON lines, each a prompt and its completion, or a plain text."""
    val: str | None = None
    """The epoch is kept that guesses these best; the last one if there are none."""
    test: str | None = None
    """What is measured."""
    length: int | None = Field(default=None, ge=2)
    """Tokens that are read at once, at most; 512, or what the model can."""

    usual: ClassVar[Schedule] = Schedule(
        epochs=10, lr=5e-2, batch_size=16, warmup_steps=0, min_steps_per_epoch=10
    )
    usual_weights: ClassVar[Schedule] = Schedule(epochs=10, lr=1e-5, batch_size=16, warmup_steps=0)

    @model_validator(mode="after")
    def _is_about_texts(self) -> Self:
        if self.method in ("search", "vector"):
            raise ValueError("method is coefficients, gradient-free, weights or none")
        if self.linearised:
            raise ValueError("linearised models are for pictures")
        if self.select == "features":
            raise ValueError("texts have no features to choose by: blockwise-gradient, say")
        return self
