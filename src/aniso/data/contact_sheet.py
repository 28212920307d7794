"""A contact sheet: sample images of a split."""

from __future__ import annotations

from PIL import Image, ImageDraw

from aniso.data import sampling
from aniso.data.splits import Labelled

_SIDE, _MARGIN, _LABEL = 96, 4, 14


def contact_sheet(split: Labelled, *, classes: int = 12, each: int = 8, seed: int = 0) -> Image.Image:
    """Draw a row for each of the first classes, with ``each`` random images of it."""
    groups = sampling.by_class(split.labels, sampling.shuffled(split.ids, "sheet", seed))
    rows = [(split.classes.names[label], members[:each]) for label, members in groups.items()][:classes]
    step = _SIDE + _MARGIN
    height = max(1, len(rows)) * (step + _LABEL) + _MARGIN
    sheet = Image.new("RGB", (each * step + _MARGIN, height), "white")
    pen = ImageDraw.Draw(sheet)
    for row, (name, members) in enumerate(rows):
        top = _MARGIN + row * (step + _LABEL)
        pen.text((_MARGIN, top), name[:60], fill="black")
        for column, index in enumerate(members):
            image = split.open(index)
            image.thumbnail((_SIDE, _SIDE))
            if max(image.size) < _SIDE:  # small images are shown as large as the others
                scale = _SIDE / max(image.size)
                image = image.resize((round(image.width * scale), round(image.height * scale)))
            sheet.paste(image, (_MARGIN + column * step, top + _LABEL))
    return sheet
