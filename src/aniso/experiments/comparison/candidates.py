"""The candidates of a comparison: few-shot settings that differ in the method, the vectors and the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from aniso.errors import UsageError, printable
from aniso.experiments.methods.coefficients import LearnedCoefficients
from aniso.experiments.methods.weights import FineTunedWeights
from aniso.experiments.methods.zero_shot import ZeroShot
from aniso.experiments.schedule_options import ScheduleOptions
from aniso.experiments.settings.few_shot import FewShot
from aniso.registry import HEADS

Also = Literal["lora", "weights"]
ALSO: tuple[Also, ...] = ("lora", "weights")
"""Methods that are compared if asked for: they take longer, and store more."""
LORA_RANK = 16
RULE = "blockwise-gradient"
"""The selection rule, which is the best one of those by gradient in our experiments."""
RECIPE = {"epochs": 4, "batch_size": 32, "min_steps_per_epoch": 12}
"""Training of every candidate: that of our few-shot experiments, about a tenth of the paper's steps."""
_HEADS = {"linear": "linear probe", "lpp": "LP++", "tip": "Tip-Adapter"}
"""Names in tables, in the order in which equals are preferred."""


@final
@dataclass(frozen=True)
class Candidate:
    """One row of a comparison."""

    label: str
    setting: FewShot
    family: str
    """What is learned beside a head: nothing, coefficients, coefficients of selected vectors, and so on."""

    @property
    def head(self) -> str | None:
        """The name of its head, if it has one."""
        return self.setting.head

    @property
    def uses_vectors(self) -> bool:
        """True if it composes vectors of the bank."""
        return self.setting.method.needs_bank


def parse_also(text: str | None) -> tuple[Also, ...]:
    """Return the methods in a list such as ``lora,weights``."""
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    unknown = [word for word in words if word not in ALSO]
    if unknown:
        raise UsageError(
            "USAGE",
            f"invalid value '{printable(unknown[0])}' for --also",
            expected=", ".join(ALSO),
            fix=f"--also {','.join(ALSO)}",
        )
    return tuple(name for name in ALSO if name in words)


def candidates(
    base: FewShot, schedule: ScheduleOptions, *, budget: int | None = None, also: Sequence[Also] = ()
) -> list[Candidate]:
    """Return all candidates, the simplest first: of equals, an earlier one is preferred.

    ``base`` names model, bank, task, shots and seed. ``budget`` is the number of cells of each block that a
    selection keeps, or None to leave selection out.
    """
    training = _with_recipe(schedule)
    out = _with_heads("zero-shot", "", base, ZeroShot())
    if base.bank is not None:
        learned = LearnedCoefficients(schedule=training)
        out += _with_heads("coefficients", "coefficients", base, learned)
        if budget is not None:
            chosen = base.model_copy(update={"select": RULE, "budget": budget})
            name = f"coefficients of {budget} selected"
            out += _with_heads(name, name, chosen, learned)
    plain = _with_recipe(schedule, lr=False)
    if "lora" in also:
        lora = FineTunedWeights(schedule=plain, lora=LORA_RANK)
        out.append(_candidate(f"LoRA, rank {LORA_RANK}", base, lora, None, "LoRA"))
    if "weights" in also:
        out += _with_heads("fine-tuning", "fine-tuning", base, FineTunedWeights(schedule=plain))
    return out


def default_budget(vectors: int) -> int | None:
    """Return a quarter of the vectors, or None if there are too few to select from."""
    return vectors // 4 if vectors >= 4 else None


def _with_heads(alone: str, prefix: str, base: FewShot, method: object) -> list[Candidate]:
    """The method alone, and with every head."""
    out = [_candidate(alone, base, method, None, alone)]
    for head in sorted(
        HEADS.names, key=lambda name: [*_HEADS].index(name) if name in _HEADS else len(_HEADS)
    ):
        name = _HEADS.get(head, head)
        out.append(_candidate(f"{prefix} + {name}" if prefix else name, base, method, head, alone))
    return out


def _candidate(label: str, base: FewShot, method: object, head: str | None, family: str) -> Candidate:
    return Candidate(label, base.model_copy(update={"method": method, "head": head}), family)


def _with_recipe(given: ScheduleOptions, *, lr: bool = True) -> ScheduleOptions:
    """The options with the recipe in place of those that were not given; ``lr`` is that of coefficients."""
    values = {name: value for name, value in given.model_dump().items() if value is not None}
    if not lr:
        values.pop("lr", None)
    return ScheduleOptions(**{**RECIPE, **values})
