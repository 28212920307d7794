"""The base of heads: they start as the class weights, are trained on a few features, and can be saved."""

from __future__ import annotations

import json
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, Self, final

import torch
from torch import Tensor, nn

from aniso.errors import InputError, NumericalError, UsageError, printable
from aniso.models import ClassWeights
from aniso.progress import ProgressCallback
from aniso.registry import HEADS
from aniso.weights import save_safetensors
from aniso.weights.fingerprint import content_checksum

HeadOption = float | int | bool | str
"""The value of a head's option."""
SCHEMA = 1
FORMAT = "aniso head"
_LOOK = 10  # steps between two evaluations on held-out features


class Classifier(Protocol):
    """Turns features into logits: class weights, or a trained head."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    def logits(self, features: Tensor) -> Tensor: ...


@final
@dataclass(frozen=True)
class RestrictedHead:
    """A classifier restricted to some of its classes, possibly in another order."""

    classifier: Classifier
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        require_known(self.names, self.classifier.names)

    @property
    def notes(self) -> tuple[str, ...]:
        return self.classifier.notes

    def logits(self, features: Tensor) -> Tensor:
        place = {name: i for i, name in enumerate(self.classifier.names)}
        return self.classifier.logits(features)[..., [place[name] for name in self.names]]


def require_known(names: Sequence[str], known: Sequence[str]) -> None:
    """Raise DATA-CLASS if a name is not one of the ``known`` classes."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(
            "DATA-CLASS",
            f"{len(unknown)} classes are not among the classes that were learned",
            found=printable(", ".join(unknown[:8])),
            expected=printable(", ".join(known[:8])),
            fix="evaluate it as a task of its own, without the head",
        )


@final
@dataclass(frozen=True)
class HeadFit:
    """Result of ``Head.fit``."""

    losses: tuple[float, ...]
    """The loss before every step."""
    kept: int
    """The step after which the head was kept; 0 is the start, when it predicts as the class weights."""


class Head(nn.Module, ABC):
    """A classifier on image features. Until it is trained it predicts as the class weights do.

    Classes are those of the class weights, whatever labels occur. Features need not be normalised.
    """

    rates: ClassVar[Mapping[str, float]] = {}
    """Learning rates of its parameters, if it can be trained together with the coefficients."""

    def __init__(self, base: ClassWeights) -> None:
        super().__init__()
        self.names = base.names
        self.notes = base.notes
        self.by_angle = base.by_angle
        self.base_weight: Tensor
        self.base_bias: Tensor | None
        self.register_buffer("base_weight", base.weight.detach().float().clone())
        self.register_buffer("base_bias", None if base.bias is None else base.bias.detach().float().clone())

    @property
    def kind(self) -> str:
        """The name the head is registered with."""
        return HEADS.name_of(type(self))

    @property
    def base(self) -> ClassWeights:
        """The class weights it started from."""
        return ClassWeights(self.names, self.base_weight, self.base_bias, self.by_angle)

    @abstractmethod
    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of every class."""

    @abstractmethod
    def _descend(self, views: Tensor, labels: Tensor) -> Iterator[float]:
        """Train step by step, yielding the loss before each; views x images x width, not normalised."""

    def fit(
        self,
        features: Tensor,
        labels: Tensor | Sequence[int],
        *,
        held_out: tuple[Tensor, Tensor] | None = None,
        progress: ProgressCallback | None = None,
    ) -> HeadFit:
        """Train on features, (views x) images x width, and labels.

        The last step is kept; with ``held_out``, other features and labels, the step that is best on them, of
        equals the first.
        """
        wanted = torch.as_tensor(labels)
        views = self._usable(features, wanted)
        choice = _Choice(self, held_out)
        losses: list[float] = []
        for loss in self._descend(views, wanted.to(views.device, torch.long)):
            losses.append(self._finite(loss, len(losses)))
            choice.look(len(losses))
            if progress:
                progress(f"head: {self.kind}", len(losses), self.steps)
        return HeadFit(tuple(losses), choice.settle(len(losses)))

    steps: int
    """The largest number of training steps."""

    @property
    def count(self) -> int:
        """Number of trained values."""
        return sum(p.numel() for p in self.parameters())

    # files

    def settings(self) -> dict[str, HeadOption]:
        """Return its options, as keyword arguments."""
        return {}

    def save(self, path: str | Path, of: Mapping[str, str], *, overwrite: bool = False) -> str:
        """Write one safetensors file; ``of`` identifies the features (``feature_identity``)."""
        index = {
            "kind": self.kind,
            "classes": list(self.names),
            "by_angle": self.by_angle,
            "settings": self.settings(),
            "features": dict(of),
        }
        text, tensors = json.dumps(index, sort_keys=True), self.tensors()
        checksum = content_checksum(text, tensors)
        meta = {"format": FORMAT, "schema": str(SCHEMA), "index": text, "checksum": checksum}
        return save_safetensors(Path(path), tensors, meta, overwrite=overwrite)

    def to_bytes(self, of: Mapping[str, str]) -> bytes:
        """Return the content of the file that ``save`` writes."""
        with tempfile.TemporaryDirectory() as place:
            self.save(Path(place) / "head", of)
            return (Path(place) / "head").read_bytes()

    def tensors(self) -> dict[str, Tensor]:
        """Return all parameters and buffers, on the CPU."""
        return {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}

    def adopt(self, tensors: Mapping[str, Tensor]) -> Self:
        """Load what ``tensors`` returned; shapes that do not match are an error."""
        self.load_state_dict(dict(tensors), strict=True)
        return self

    # checks

    def _usable(self, features: Tensor, labels: Tensor) -> Tensor:
        views = features if features.dim() == 3 else features[None]
        fitting = views.dim() == 3 and views.shape[1:] == (*labels.shape, self.base_weight.shape[1])
        if not fitting or not len(views):
            raise UsageError(
                "HEAD-FEATURES",
                "features and labels do not match each other, or the model",
                found=f"features {tuple(features.shape)}, labels {tuple(labels.shape)}",
                expected=f"(views x) images x {self.base_weight.shape[1]}, and as many labels",
                fix="aniso.features(model, split)",
            )
        self._require_classes(labels)
        bad = (~torch.isfinite(views).all(-1).all(0)).nonzero().flatten().tolist()
        if bad:
            raise NumericalError(
                "LEARN-NONFINITE",
                f"the features of {len(bad)} images are NaN or infinite",
                first=f"image {bad[0]}, '{printable(self.names[int(labels[bad[0]])])}'",
                fix="look at these images, or for coefficients that are too large: aniso coefficients show",
            )
        return views.detach().float()

    def _require_classes(self, labels: Tensor) -> None:
        """Every class needs an image: the head would learn never to predict a class without any."""
        if len(self.names) < 2:
            raise InputError(
                "HEAD-CLASS",
                f"'{printable(self.names[0])}' is the only class: a head needs two or more",
                fix="use a task with two classes or more",
            )
        outside = [int(x) for x in set(labels.tolist()) if not 0 <= x < len(self.names)]
        if outside or labels.is_floating_point():
            raise UsageError(
                "HEAD-CLASS",
                f"{outside[0] if outside else labels.dtype} is not a label of {len(self.names)} classes",
                expected=f"whole numbers from 0 to {len(self.names) - 1}",
                fix="number labels as the classes are",
            )
        counts = torch.bincount(labels.cpu().long(), minlength=len(self.names)).tolist()
        absent = [name for name, n in zip(self.names, counts, strict=True) if not n]
        if absent:
            raise InputError(
                "HEAD-CLASS",
                f"there is no image of {len(absent)} of {len(self.names)} classes",
                found=[printable(name, 40) for name in absent[:10]],
                more=f"{len(absent) - 10} more classes" if len(absent) > 10 else "",
                fix="add an image of each, remove them from the task, or train without --head",
            )

    def _finite(self, loss: float, step: int) -> float:
        if not abs(loss) < float("inf"):
            raise NumericalError(
                "LEARN-NONFINITE",
                f"the loss of the head is {loss} in step {step + 1}",
                fix="--head lpp --head-option momentum=0 --head-option bias=false, which cannot diverge",
            )
        return loss


@final
class _Choice:
    """Keeps the best step so far on held-out features, if there are any."""

    def __init__(self, head: Head, held_out: tuple[Tensor, Tensor] | None) -> None:
        self._head = head
        self._held_out = held_out
        self._best = -1
        self._kept = 0
        self._tensors: dict[str, Tensor] = {}
        if held_out is not None:
            self._measure(0)

    def look(self, step: int) -> None:
        if self._held_out is not None and step % _LOOK == 0:
            self._measure(step)

    def settle(self, steps: int) -> int:
        """Restore the best step, and return its number."""
        if self._held_out is None:
            return steps
        self._measure(steps)
        self._head.adopt(self._tensors)
        return self._kept

    @torch.no_grad()
    def _measure(self, step: int) -> None:
        assert self._held_out is not None
        features, labels = self._held_out
        logits = self._head.logits(features)
        if not bool(torch.isfinite(logits).all()):
            raise NumericalError(
                "LEARN-NONFINITE",
                f"the logits of held-out images are NaN or infinite in step {step}",
                fix="look at these images, or for coefficients that are too large: aniso coefficients show",
            )
        right = int((logits.argmax(-1) == labels.to(features.device)).sum())
        if right > self._best:
            self._best, self._kept = right, step
            self._tensors = {name: t.detach().clone() for name, t in self._head.state_dict().items()}
