"""A sheet of sample pictures: what is in a split, at a glance."""

from __future__ import annotations

from PIL import Image, ImageDraw

from aniso.data import sampling
from aniso.data.splits import Labelled

_SIDE, _MARGIN, _LABEL = 96, 4, 14


def contact_sheet(split: Labelled, *, classes: int = 12, each: int = 8, seed: int = 0) -> Image.Image:
    """A row for each of the first classes, with pictures of it drawn at random."""
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
            picture = split.picture(index)
            picture.thumbnail((_SIDE, _SIDE))
            if max(picture.size) < _SIDE:  # small pictures are shown as large as the others
                scale = _SIDE / max(picture.size)
                picture = picture.resize((round(picture.width * scale), round(picture.height * scale)))
            sheet.paste(picture, (_MARGIN + column * step, top + _LABEL))
    return sheet
