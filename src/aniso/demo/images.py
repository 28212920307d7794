"""Three small tasks as folders of images: real handwritten digits, and drawn patterns and colours."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from PIL import Image, ImageDraw

from aniso.progress import ProgressCallback
from aniso.weights.atomic import atomic_directory

SIDE, EACH = 64, 100
Colour = tuple[int, int, int]
_PALETTE: dict[str, Colour] = {
    "red": (220, 30, 30),
    "green": (30, 170, 50),
    "blue": (30, 60, 220),
    "yellow": (240, 220, 40),
    "purple": (130, 40, 160),
    "orange": (250, 140, 20),
    "white": (245, 245, 245),
    "black": (15, 15, 15),
}
_PROMPTS = {
    "digits": ('a photo of the number: "{}".', "a handwritten digit {}."),
    "patterns": ("a pattern of {}.",),
    "colours": ("a {} picture.",),
}


def write_tasks(directory: Path, progress: ProgressCallback, each: int | None = None) -> None:
    """Write a folder per class with ``each`` images and a card with prompts, like a user's own folder."""
    with atomic_directory(directory, overwrite=True) as place:
        makers = {"digits": _digits(), "patterns": _patterns(), "colours": _colours()}
        for n, (task, classes) in enumerate(makers.items()):
            for name, make in classes.items():
                folder = place / task / name
                folder.mkdir(parents=True)
                for i in range(EACH if each is None else each):
                    make(i).save(folder / f"{i:03}.png")
            prompts = ", ".join(f"'{prompt}'" for prompt in _PROMPTS[task])
            (place / task / "task.toml").write_text(f"prompts = [{prompts}]\n")
            progress("drawing images", n + 1, len(makers))


Maker = Callable[[int], Image.Image]


def _digits() -> dict[str, Maker]:
    """Cut white digits on black from the bundled sheet: row n holds the digits n, eight pixels each."""
    with resources.as_file(resources.files("aniso.demo") / "digits.png") as path:
        sheet = Image.open(path).convert("RGB")

    def digit(n: int) -> Maker:
        return lambda i: sheet.crop((8 * i, 8 * n, 8 * i + 8, 8 * n + 8)).resize(
            (SIDE, SIDE), Image.Resampling.BICUBIC
        )

    return {str(n): digit(n) for n in range(10)}


def _colours() -> dict[str, Maker]:
    def spots(name: str, base: Colour) -> Maker:
        def make(i: int) -> Image.Image:
            chance = random.Random(f"{name} {i}")
            image = Image.new("RGB", (SIDE, SIDE), _near(chance, base, 25))
            pen = ImageDraw.Draw(image)
            for _ in range(4):
                x, y, r = chance.randint(0, SIDE), chance.randint(0, SIDE), chance.randint(3, 15)
                pen.ellipse((x - r, y - r, x + r, y + r), fill=_near(chance, base, 30))
            return image

        return make

    return {name: spots(name, base) for name, base in _PALETTE.items()}


def _patterns() -> dict[str, Maker]:
    kinds = ("horizontal stripes", "vertical stripes", "diagonal stripes", "grid", "dots", "checkerboard")

    def pattern(kind: str) -> Maker:
        def make(i: int) -> Image.Image:
            chance = random.Random(f"{kind} {i}")
            ground = _near(chance, (128, 128, 128), 127)
            image = Image.new("RGB", (SIDE, SIDE), ground)
            size = chance.randint(5, 11)
            _draw(ImageDraw.Draw(image), kind, size, chance.randint(0, size), _far(chance, ground))
            return image

        return make

    return {kind: pattern(kind) for kind in kinds}


def _draw(pen: ImageDraw.ImageDraw, kind: str, size: int, shift: int, ink: Colour) -> None:
    for n, a in enumerate(range(shift - 2 * size, SIDE + size, size)):
        if kind == "grid":
            pen.line((0, a, SIDE, a), fill=ink, width=2)
            pen.line((a, 0, a, SIDE), fill=ink, width=2)
        elif kind == "diagonal stripes" and n % 2:
            pen.line((2 * a - SIDE, -4, 2 * a + 8, SIDE + 4), fill=ink, width=size)
        elif kind == "horizontal stripes" and n % 2:
            pen.rectangle((0, a, SIDE, a + size - 1), fill=ink)
        elif kind == "vertical stripes" and n % 2:
            pen.rectangle((a, 0, a + size - 1, SIDE), fill=ink)
        elif kind in ("dots", "checkerboard"):
            _row(pen, kind, n, a, size, shift, ink)


def _row(pen: ImageDraw.ImageDraw, kind: str, n: int, a: int, size: int, shift: int, ink: Colour) -> None:
    for m, b in enumerate(range(shift - 2 * size, SIDE + size, size)):
        if kind == "dots":
            pen.ellipse((b, a, b + size // 2, a + size // 2), fill=ink)
        elif (n + m) % 2:
            pen.rectangle((b, a, b + size - 1, a + size - 1), fill=ink)


def _near(chance: random.Random, base: Colour, spread: int) -> Colour:
    r, g, b = (max(0, min(255, value + chance.randint(-spread, spread))) for value in base)
    return r, g, b


def _far(chance: random.Random, base: Colour) -> Colour:
    while True:
        found = _near(chance, (128, 128, 128), 127)
        if sum(abs(a - b) for a, b in zip(found, base, strict=True)) > 220:
            return found
