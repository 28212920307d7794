"""Preprocessing of images: for evaluation, for training, and strong augmentation for self-training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, final

import torch
from torch import Tensor

from aniso.json_value import JsonObject

if TYPE_CHECKING:
    from PIL import Image

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_RATIO = (3 / 4, 4 / 3)
_TRIES = 10
_LONGEST = 32


@dataclass(frozen=True)
class Pixels:
    """The size, normalisation and resizing that a model expects."""

    size: int
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    resize: Literal["shortest", "squash"] = "shortest"
    """Scale the shorter side and crop the centre, or scale both sides."""
    margin: float = 1.0
    """The shorter side (or both) is scaled to size / margin before the centre crop."""

    def scaled(self, pixels: Tensor, height: int, width: int) -> Tensor:
        """Resize uint8 pixels with torchvision, antialiased."""
        from torchvision.transforms.v2 import InterpolationMode, functional

        mode = InterpolationMode(self.interpolation)
        out: Tensor = functional.resize_image(pixels, [height, width], interpolation=mode, antialias=True)
        return out


class _View:
    """The base of all views: normalises a stack of uint8 images."""

    pixels: Pixels

    def finish(self, pixels: Tensor) -> Tensor:
        """Return normalised floats, the model's input."""
        mean = torch.tensor(self.pixels.mean).view(3, 1, 1) * 255
        std = torch.tensor(self.pixels.std).view(3, 1, 1) * 255
        return pixels.float().sub_(mean).div_(std)

    def lengths(self, items: object) -> None:
        """All images have one size."""


@final
@dataclass(frozen=True)
class Whole(_View):
    """The centre crop of an image; nothing is random."""

    pixels: Pixels
    name: str = "eval"

    def __call__(self, image: Image.Image, rng: torch.Generator) -> Tensor:
        from torchvision.transforms.v2.functional import center_crop_image

        pixels, size = _tensor(image), self.pixels.size
        if self.pixels.resize == "shortest":
            pixels = _shortened(pixels)
        tall = wide = short = int(size / self.pixels.margin)
        height, width = pixels.shape[-2:]
        # the longer side is cut down to a whole number, as torchvision and Pillow pipelines do
        if self.pixels.resize == "shortest" and height < width:
            wide = int(short * width / height)
        elif self.pixels.resize == "shortest":
            tall = int(short * height / width)
        middle: Tensor = center_crop_image(self.pixels.scaled(pixels, tall, wide), [size, size])
        return middle


@final
@dataclass(frozen=True)
class Crop(_View):
    """A random resized crop; with ``flip``, mirrored half of the time."""

    pixels: Pixels
    least: float
    """The smallest share of the area."""
    flip: bool = False
    name: str = "train"

    def __call__(self, image: Image.Image, rng: torch.Generator) -> Tensor:
        pixels = _tensor(image)
        top, left, height, width = _piece(pixels.shape[-2], pixels.shape[-1], self.least, rng)
        cut = pixels[:, top : top + height, left : left + width]
        view = self.pixels.scaled(cut, self.pixels.size, self.pixels.size)
        return view.flip(-1) if self.flip and _uniform(rng) < 0.5 else view


@final
@dataclass(frozen=True)
class Strong(_View):
    """A random crop, then two augmentations of FixMatch's list, then a grey patch (cutout)."""

    pixels: Pixels
    least: float = 0.5
    changes: int = 2
    name: str = "strong"

    def __call__(self, image: Image.Image, rng: torch.Generator) -> Tensor:
        view = Crop(self.pixels, self.least, flip=True)(image, rng)
        for _ in range(self.changes):
            change = CHANGES[int(torch.randint(len(CHANGES), (), generator=rng))]
            view = change(view, rng)
        return _patched(view, rng)


@final
@dataclass(frozen=True)
class Transforms:
    """The views of one model."""

    pixels: Pixels
    kind: ClassVar[str] = "images"
    """The items that the model takes."""

    def identity(self) -> JsonObject:
        """Everything the views depend on, as JSON-serialisable data."""
        return {"pixels": asdict(self.pixels)}

    def notes(self, items: object, name: str) -> tuple[str, ...]:
        """Return what a user should know about items as this model reads them: nothing, for images."""
        return ()

    def augmented(self, name: str) -> Crop | Strong:
        """Return the view that self-training compares with the whole item: train, few_shot or strong."""
        found: Crop | Strong = getattr(self, name)
        return found

    @cached_property
    def eval(self) -> Whole:
        """For evaluation; also the weak view of self-training."""
        return Whole(self.pixels)

    @cached_property
    def train(self) -> Crop:
        """For fine-tuning task vectors."""
        return Crop(self.pixels, 0.9)

    @cached_property
    def few_shot(self) -> Crop:
        return Crop(self.pixels, 0.5, flip=True, name="few-shot")

    @cached_property
    def strong(self) -> Strong:
        return Strong(self.pixels)


def _tensor(image: Image.Image) -> Tensor:
    from torchvision.transforms.v2.functional import pil_to_tensor

    out: Tensor = pil_to_tensor(image)
    return out


def _shortened(pixels: Tensor) -> Tensor:
    """Crop an image much longer than wide: scaled, all of it could exceed memory."""
    height, width = pixels.shape[-2:]
    most = _LONGEST * min(height, width)
    top, left = max(0, height - most) // 2, max(0, width - most) // 2
    return pixels[:, top : top + most, left : left + most]


def _uniform(rng: torch.Generator, low: float = 0.0, high: float = 1.0) -> float:
    return low + (high - low) * float(torch.rand((), generator=rng))


def _piece(height: int, width: int, least: float, rng: torch.Generator) -> tuple[int, int, int, int]:
    """Return top, left, height and width of a random crop, by torchvision's rule: ten tries, then centre."""
    for _ in range(_TRIES):
        area = height * width * _uniform(rng, least)
        ratio = math.exp(_uniform(rng, math.log(_RATIO[0]), math.log(_RATIO[1])))
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            top = int(torch.randint(height - tall + 1, (), generator=rng))
            left = int(torch.randint(width - wide + 1, (), generator=rng))
            return top, left, tall, wide
    tall = min(height, round(width / _RATIO[0]))
    wide = min(width, round(height * _RATIO[1]))
    return (height - tall) // 2, (width - wide) // 2, tall, wide


# FixMatch's changes: name of torchvision's function and the range its strength is drawn from

Change = Callable[[Tensor, torch.Generator], Tensor]


def _pointwise(name: str, low: float, high: float, whole: bool = False) -> Change:
    def change(view: Tensor, rng: torch.Generator) -> Tensor:
        from torchvision.transforms.v2 import functional

        strength = _uniform(rng, low, high)
        out: Tensor = getattr(functional, name)(view, int(strength) if whole else strength)
        return out

    return change


def _plain(name: str) -> Change:
    def change(view: Tensor, rng: torch.Generator) -> Tensor:
        from torchvision.transforms.v2 import functional

        out: Tensor = getattr(functional, name)(view)
        return out

    return change


def _moved(
    angle: float = 0.0, shift: tuple[float, float] = (0, 0), shear: tuple[float, float] = (0, 0)
) -> Change:
    """Return a random rotation, shift (share of the size) or shear (degrees), up to these limits."""

    def change(view: Tensor, rng: torch.Generator) -> Tensor:
        from torchvision.transforms.v2 import InterpolationMode, functional

        strength = _uniform(rng, -1, 1)
        settings: JsonObject = {
            "angle": angle * strength,
            "translate": [round(part * strength * view.shape[-1]) for part in shift],
            "scale": 1.0,
            "shear": [part * strength for part in shear],
        }
        out: Tensor = functional.affine_image(view, interpolation=InterpolationMode.BILINEAR, **settings)
        return out

    return change


CHANGES: tuple[Change, ...] = (
    _plain("autocontrast"),
    _plain("equalize"),
    lambda view, rng: view,
    _pointwise("adjust_brightness", 0.05, 0.95),
    _pointwise("adjust_contrast", 0.05, 0.95),
    _pointwise("adjust_saturation", 0.05, 0.95),
    _pointwise("adjust_sharpness", 0.05, 0.95),
    _pointwise("posterize", 4, 9, whole=True),
    _pointwise("solarize", 0, 255),
    _moved(angle=30),
    _moved(shear=(16.7, 0)),
    _moved(shear=(0, 16.7)),
    _moved(shift=(0.3, 0)),
    _moved(shift=(0, 0.3)),
)


def _patched(view: Tensor, rng: torch.Generator) -> Tensor:
    """Draw a grey square of up to half the side at a random place."""
    size = view.shape[-1]
    side = int(_uniform(rng, 0, 0.5) * size)
    top, left = (int(torch.randint(size, (), generator=rng)) - side // 2 for _ in range(2))
    out = view.clone()
    out[:, max(0, top) : top + side, max(0, left) : left + side] = 127
    return out
