"""Draw the pictures of docs/gallery.md from committed records and the bundled bank, and write the page.

python scripts/gallery.py
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aniso.records import Record

ROOT = Path(__file__).parents[1]
PLACE = ROOT / "docs" / "gallery"
PAGE = ROOT / "docs" / "gallery.md"
LARGEST = 60_000  # bytes of a picture
_WIDTH = 1300  # pixels
_COLOURS = (256, 128, 64, 48)  # the most that give a small file


@dataclass(frozen=True)
class Picture:
    """A figure of one experiment, or of a command that needs no records."""

    name: str
    heading: str
    text: str
    figure: str = ""
    experiment: str = ""
    label: str = ""
    """Runs with this label alone, if the experiment has several with coefficients."""
    command: tuple[str, ...] = ()

    @property
    def shown_command(self) -> str:
        """The command that draws the figure."""
        if self.command:
            return " ".join(("aniso", *self.command, "-o", f"{self.name}.png"))
        label = f' --label "{self.label}"' if self.label else ""
        return f"aniso report experiments/{self.experiment}/records --figure {self.figure}{label} -o figures"


_SEEDS = "Means over three seeds."
_LEARNED = "learned anisotropic"
PICTURES = (
    Picture(
        "few-shot-curves", "Few-shot accuracy",
        "Mean over 21 tasks. LP++ with its authors' options was run for 1, 4 and 16 shots.",
        "few-shot-curves", "few-shot",
    ),
    Picture(
        "venn", "Complementarity",
        "Images that the base gets wrong and a method gets right, per cent of all test images.",
        "venn", "few-shot",
    ),
    Picture(
        "out-of-domain-bars", "Out of domain",
        "Learned on photographs of PACS, evaluated on them and on its other three domains.",
        "out-of-domain-bars", "out-of-domain",
    ),
    Picture(
        "budget-curves", "Budgets",
        "Accuracy by the number of vectors that a selection rule keeps.",
        "budget-curves", "selection",
    ),
    Picture(
        "data-share-curves", "Share of the training data",
        "One coefficient per block (x1), 10 and 80 random parts per block, and a LoRA; one task.",
        "data-share-curves", "xk",
    ),
    Picture(
        "random-bases", "Random bases",
        "Random directions against task vectors. There are no runs of full fine-tuning in this experiment, "
        "so accuracies are absolute.",
        "random-bases", "random-bases",
    ),
    Picture(
        "validation-share-curves", "Share of the validation data",
        "Addition on mini, learned from shares of the validation images.",
        "validation-share-curves", "addition",
    ),
    Picture(
        "heatmap-addition", "Coefficients: heat map of addition",
        "One mini for eight tasks; the 1-norm of the coefficients is part of the objective, as in the "
        f"paper's figure. {_SEEDS}",
        "coefficient-heatmap", "addition", f"{_LEARNED}, 1-norm",
    ),
    Picture(
        "boxes-kind-addition", "Coefficients of addition by type of block: mini",
        "A transformer. Its layers have twelve types of block: W and b are weights and biases, γ and β "  # noqa: RUF001
        f"those of norms. All eight vectors, and the first five of them. {_SEEDS}",
        "coefficient-boxes-kind", "addition", _LEARNED,
    ),
    Picture(
        "boxes-depth-addition", "Coefficients of addition by layer: mini",
        f"All eight vectors, and the first five of them. {_SEEDS}",
        "coefficient-boxes-depth", "addition", _LEARNED,
    ),
    Picture(
        "boxes-kind-lite0", "Coefficients of addition by type of block: lite0",
        "A convolutional network. Of a block's convolutions pw widens, dw is depthwise and pwl narrows. "
        f"The widening ones have the largest coefficients. {_SEEDS}",
        "coefficient-boxes-kind", "lite0-addition", _LEARNED,
    ),
    Picture(
        "boxes-depth-lite0", "Coefficients of addition by stage: lite0",
        f"All eight vectors, and the first five of them. {_SEEDS}",
        "coefficient-boxes-depth", "lite0-addition", _LEARNED,
    ),
    Picture(
        "boxes-kind-minilm", "Coefficients of addition by kind of block: MiniLM",
        "A transformer for texts. Records of an earlier version, which keep five numbers by kind alone. "
        f"{_SEEDS}",
        "coefficient-boxes-kind", "minilm-addition", _LEARNED,
    ),
    Picture(
        "boxes-kind-negation", "Coefficients of negation by kind of block: mini",
        f"Weight matrices have the largest negative medians, as in the paper. {_SEEDS}",
        "coefficient-boxes-kind", "negation", _LEARNED,
    ),
    Picture(
        "boxes-kind-negation-lite0", "Coefficients of negation by type of block: lite0",
        f"All four targets, and each of them. {_SEEDS}",
        "coefficient-boxes-kind", "lite0-negation", _LEARNED,
    ),
    Picture(
        "distributions", "Mean features of tasks",
        "The tasks of the bundled bank; [analyses](howto/analyse.md) need no records.",
        command=("analyse", "distributions", "--bank", "mini"),
    ),
)  # fmt: skip
NOT_SHOWN: dict[str, str] = {}
"""Figures that the committed records do not allow."""


def records_of(picture: Picture) -> list[Record]:
    """Return the records that a picture is drawn from."""
    from aniso.record_files import read_records

    labels = [picture.label] if picture.label else []
    return read_records([ROOT / "experiments" / picture.experiment / "records"], labels)


def drawn(picture: Picture) -> bytes:
    """Draw a picture, as a PNG of few colours."""
    from aniso.cli import main as aniso
    from aniso.report import draw_figure

    if not picture.command:
        return smaller(draw_figure(picture.figure, records_of(picture)))
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "figure.png"
        with contextlib.redirect_stdout(io.StringIO()):
            code = aniso([*picture.command, "-o", str(path)])
        if code:
            sys.exit(code)
        return smaller(path.read_bytes())


def smaller(png: bytes) -> bytes:
    """Return the picture with a palette, at most 1300 pixels wide."""
    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGB")
    if image.width > _WIDTH:
        size = (_WIDTH, round(image.height * _WIDTH / image.width))
        image = image.resize(size, Image.Resampling.LANCZOS)
    for colours in _COLOURS:
        out = io.BytesIO()
        few = image.quantize(colours, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(out, "PNG", optimize=True)
        if len(out.getvalue()) <= LARGEST:
            break
    return out.getvalue()


def page() -> str:
    """Return the text of docs/gallery.md."""
    from aniso.report import FIGURES

    lines = [
        "# Gallery",
        "",
        "Figures of the committed [experiments](../experiments/README.md), drawn from their records alone by "
        "`python scripts/gallery.py`. Unless it says otherwise a figure is of the bundled [mini](mini.md) "
        "model, whose numbers are far below those of a CLIP. [Figures from records](howto/learn.md#figures) "
        "has the commands for your own runs.",
        "",
    ]
    for picture in PICTURES:
        lines += [f"## {picture.heading}", "", picture.text, ""]
        lines += [f"![{picture.heading}](gallery/{picture.name}.png)", ""]
        lines += [f"`{picture.shown_command}`", ""]
    lines += ["## All figures", "", "| name | figure |", "| --- | --- |"]
    lines += [f"| `{name}` | {description} |" for name, description in FIGURES.items()]
    lines += ["", *(f"`{name}` is not shown: {reason}." for name, reason in NOT_SHOWN.items())]
    return "\n".join(lines) + "\n"


def main(names: Sequence[str]) -> None:
    """Draw the named pictures, or all, and write the page."""
    PLACE.mkdir(exist_ok=True)
    for picture in PICTURES:
        if names and picture.name not in names:
            continue
        content = drawn(picture)
        if len(content) > LARGEST:
            sys.exit(f"{picture.name}: {len(content):,} bytes")
        (PLACE / f"{picture.name}.png").write_bytes(content)
        print(f"{picture.name}: {len(content):,} bytes")
    PAGE.write_text(page())


if __name__ == "__main__":
    main(sys.argv[1:])
