"""GPU hours of a recipe, estimated from its cells: images through the encoder, at an assumed rate.

A forward pass of one image is the unit. Training costs three of them per image (forward, and a backward pass
of twice the work), more for objectives that see an image several times; linearised models cost twice as much,
since their forward pass carries a tangent. Heads on stored features, decoding and text encoders are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast, final

from aniso.experiments.methods import TrainingMethod
from aniso.experiments.methods.gradient_free import GradientFree
from aniso.experiments.paper.recipe import DataSet
from aniso.experiments.settings import Setting

GFLOPS = {"ViT-B-32": 8.82, "ViT-B-16": 35.13, "ViT-L-14": 162.03, "RN50": 12.22, "RN101": 19.54}
"""Of a forward pass of the image encoder at 224 pixels, as open_clip's model profile states them."""
TFLOPS = 10.0
"""Assumed rate: about half of what an A100 can do in fp32, aniso's default precision."""
_TRAINING = 3
_OBJECTIVES = {"contrastive": 6, "sar": 6, "fixmatch": 4}
"""Forward passes per image and step: two views, two backward passes, a weak view without gradient."""
_LINEARISED = 2


@final
@dataclass(frozen=True)
class Work:
    """What cells amount to."""

    steps: int = 0
    trained: int = 0
    """Images of all training steps."""
    passes: int = 0
    """Forward passes of images that all of it costs, training included."""
    cells: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.steps + other.steps,
            self.trained + other.trained,
            self.passes + other.passes,
            self.cells + other.cells,
        )

    def times(self, count: int) -> Work:
        """Return the work of so many."""
        return Work(self.steps * count, self.trained * count, self.passes * count, self.cells * count)

    def hours(self, backbone: str, tflops: float = TFLOPS) -> float:
        """Return hours on a GPU that sustains so many tera floating-point operations per second."""
        return self.passes * GFLOPS[backbone] / (tflops * 1e3) / 3600


def basis(backbone: str, work: Work, tflops: float = TFLOPS) -> str:
    """Return what an estimate is computed from."""
    return (
        f"{work.cells:,} runs, {work.steps:,} steps, {work.passes:,} forward passes of an image "
        f"(a training step counts 3 per image) x {GFLOPS[backbone]:g} GFLOP / {tflops:g} TFLOP/s, assumed"
    )


def total(settings: Iterable[tuple[Setting, int]], data_sets: Mapping[str, DataSet]) -> Work:
    """Return the work of settings, each as many times as it says."""
    out = Work()
    for setting, count in settings:
        out += setting_work(setting, data_sets).times(count)
    return out


def setting_work(setting: Setting, data_sets: Mapping[str, DataSet]) -> Work:
    """Return the work of one run: training or search, validation, evaluation."""
    sizes = _Sizes(setting, data_sets)
    steps = trained = passes = 0
    method = setting.method
    epochs = 0
    if isinstance(method, TrainingMethod):
        steps, epochs = sizes.steps, sizes.epochs
        trained = steps * method.resolved_schedule(setting).batch_size
        passes += trained * _OBJECTIVES.get(getattr(setting, "objective", ""), _TRAINING)
    elif isinstance(method, GradientFree):
        passes += method.evaluations * sum(sizes.learned)
        epochs = 10
    elif method.name == "search":
        epochs = 20  # 21 scales, the base among them
    if method.chooses:
        passes += (epochs + 1) * sum(sizes.kept)
    passes += sizes.for_selection + sizes.for_head + sum(sizes.tests) * (2 if setting.compare else 1)
    if setting.name == "addition" and (method.minimises or method.chooses):
        passes += sum(sizes.kept) + sum(sizes.tests)  # with the tasks' own vectors
    factor = _LINEARISED if setting.is_linearised else 1
    return Work(steps, trained, factor * passes, 1)


class _Sizes:
    """Numbers of images that a setting learns from, validates on and is evaluated on."""

    def __init__(self, setting: Setting, data_sets: Mapping[str, DataSet]) -> None:
        self.setting = setting
        self._known = data_sets
        spec: Any = setting
        self._names: list[str] = (
            [spec.control, spec.target]
            if setting.name == "negation"
            else list(spec.tasks)
            if setting.name == "addition"
            else [spec.task]
        )

    @property
    def _sets(self) -> list[DataSet]:
        return [self._known[name.removeprefix("./")] for name in self._names]

    @property
    def learned(self) -> list[int]:
        """Images of every term of the objective."""
        spec: Any = self.setting
        share = float(getattr(spec, "fraction", 1.0))
        if self.setting.name in ("addition", "negation"):
            return [max(1, round(own.val * share)) for own in self._sets]
        (own,) = self._sets
        if self.setting.name == "few-shot":
            return [min(own.train, own.classes * spec.shots)]
        if self.setting.name == "test-time":
            return [own.test]
        return [max(1, round(own.train * share))]

    @property
    def kept(self) -> list[int]:
        """Images that epochs, or scales, are chosen on."""
        spec: Any = self.setting
        if self.setting.name in ("addition", "negation"):
            return self.learned
        if self.setting.name in ("finetune", "test-time") or spec.keep == "last":
            return []
        return [own.val for own in self._sets]

    @property
    def tests(self) -> list[int]:
        spec: Any = self.setting
        others: Sequence[str] = getattr(spec, "out_of_domain", ())
        return [own.test for own in self._sets] + [
            self._known[name.removeprefix("./")].test for name in others
        ]

    @property
    def for_selection(self) -> int:
        gradient = self.setting.selection is not None and "gradient" in self.setting.selection[0]
        return _TRAINING * sum(self.learned) if gradient else 0

    @property
    def for_head(self) -> int:
        """Augmented views of the shots, and validation features, that a head is learned on."""
        from aniso.experiments.head_fitting import VIEWS

        return VIEWS * sum(self.learned) + sum(self.kept) if self.setting.head_name is not None else 0

    @cached_property
    def _sampler(self) -> Any:
        from aniso.learn import EpochSampler
        from aniso.registry import OBJECTIVES

        method = self.setting.method
        assert isinstance(method, TrainingMethod)
        objective = getattr(self.setting, "objective", "")
        reserved = OBJECTIVES.get(objective).reserved_share if objective else 0.0
        splits = cast(Any, [(range(count), ()) for count in self.learned])
        target = 1 if self.setting.name == "negation" else None
        return EpochSampler(
            splits, method.resolved_schedule(self.setting), 0, [reserved] * len(splits), target
        )

    @property
    def steps(self) -> int:
        """Steps of training, counted as training counts them."""
        return int(self._sampler.total_steps)

    @property
    def epochs(self) -> int:
        return int(self._sampler.epochs)


def analysis_work(
    analysis: str, compositions: int, tasks: Sequence[str], data_sets: Mapping[str, DataSet]
) -> Work:
    """Return the work of an analysis after its runs."""
    if analysis == "distributions":
        return Work(passes=sum(data_sets[name].train for name in tasks))
    if analysis == "disentanglement":  # every task with its own vector alone, and with each of the others
        return Work(passes=compositions * len(tasks) * sum(data_sets[name].test for name in tasks))
    return Work()
