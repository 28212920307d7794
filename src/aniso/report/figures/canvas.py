"""The canvas of all figures: one style, readable in print and for every kind of colour vision."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, final

from aniso.coefficient_matrix import BlockLabel
from aniso.errors import UsageError, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Kind = Literal["png", "svg"]

# Okabe and Ito's colours; markers tell lines apart where there is no colour at all.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
INK, GREY, LIGHT, LINE = "#24272c", "#6b7078", "#a9aeb6", "#d5d8dd"
DASHES = (0, (4, 3))
POINTS_PER_INCH = 72
_LONGEST = 44
_STYLE: dict[str, object] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so the same everywhere
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "text.parse_math": False,  # a name with dollar signs is a name
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "savefig.dpi": 200,
    "svg.hashsalt": "aniso",  # ids in the file are the same every time
    "svg.fonttype": "path",
}


@final
@dataclass(frozen=True)
class HeatMapData:
    """The numbers of a heat map, as a mean and, of several seeds, by seed; NaN where there is no cell."""

    rows: tuple[str, ...]
    columns: tuple[tuple[str, BlockLabel], ...]
    """The label and the block of every column."""
    values: Mapping[str, Sequence[Sequence[float]]]
    """Rows of numbers by what they are of: all runs, or those of a seed."""


@final
@dataclass(frozen=True)
class Plot:
    """A figure that has not been drawn yet, and its caption."""

    caption: str
    draw: Callable[[Kind], bytes]
    data: HeatMapData | None = None
    """The numbers of a heat map, for pages that show them."""


class Canvas:
    """A figure with one plot; ``content`` holds the file once the drawing is done."""

    content: bytes = b""

    def __init__(self) -> None:
        from matplotlib.figure import Figure

        self.figure = Figure(layout="constrained")
        self.axes: Axes = self.figure.add_subplot()

    def frame(self, width: float, height: float, title: str = "") -> None:
        """Set the size in inches, and the title."""
        self.width, self.height = width, height
        self.figure.set_size_inches(width, height)
        if title:
            self.axes.set_title(printable(title, 100))


def require_matplotlib() -> None:
    """Raise an error that names the optional extra unless matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(
            "MODEL-LIBRARY",
            "figures need matplotlib, which is not installed",
            fix="pip install 'aniso[plot]'",
        ) from None


@contextmanager
def drawing(kind: Kind) -> Iterator[Canvas]:
    """Yield a canvas in aniso's style, whatever the user's settings; equal numbers give equal bytes."""
    if kind not in ("png", "svg"):
        raise UsageError(
            "RECORD",
            f"figures cannot be written as '{printable(kind)}'",
            expected="png or svg",
            fix="kind='png'",
        )
    require_matplotlib()
    from matplotlib import style

    with style.context(_STYLE, after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing")  # shown as a box
        canvas = Canvas()
        yield canvas
        out = io.BytesIO()
        canvas.figure.savefig(out, format=kind, metadata={"Date" if kind == "svg" else "Software": None})
        canvas.content = out.getvalue()


def short(text: str, width: int = 0, longest: int = _LONGEST) -> str:
    """Shorten a name: no control characters, cut, wrapped if a width is given."""
    cut = printable(text, longest)
    return "\n".join(textwrap.wrap(cut, width) or [cut]) if width else cut


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def marker(number: int) -> str:
    return MARKERS[number % len(MARKERS)]


def spread(
    places: Sequence[float], gaps: Sequence[float], low: float = -math.inf, high: float = math.inf
) -> list[float]:
    """Move sorted places as little as possible to be these gaps apart, within bounds if they can be."""
    offsets = list(accumulate(gaps, initial=0.0))[: len(places)]
    pools: list[list[float]] = []  # neighbours that touch move as one, to the mean of where they want to be
    for place, offset in zip(places, offsets, strict=True):
        pools.append([place - offset])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    last = offsets[-1] if offsets else 0.0
    moved = [max(low, min(high - last, fmean(pool))) for pool in pools for _ in pool]
    return [base + offset for base, offset in zip(moved, offsets, strict=True)]


def panels_across(count: int) -> int:
    """Return how many panels stand side by side: at most three, and two if there are four."""
    return 2 if count == 4 else min(3, count)


def keep_outer_labels(places: Sequence[Axes]) -> None:
    """Remove labels of axes that a panel below or to the left has."""
    across = panels_across(len(places))
    for i, axes in enumerate(places):
        if i % across:
            axes.set_ylabel("")
        if i + across < len(places):
            axes.set_xlabel("")


def panel_grid(canvas: Canvas, count: int, size: tuple[float, float], title: str = "") -> list[Axes]:
    """Replace the plot by a grid of plots, each of this size in inches, that share both axes."""
    across = panels_across(count)
    down = math.ceil(count / across)
    canvas.axes.remove()
    canvas.frame(across * size[0], down * size[1] + (0.3 if title else 0))
    if title:
        canvas.figure.suptitle(printable(title, 100), x=0.01, ha="left", fontsize=10)
    grid = list(canvas.figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).flat)
    for i, axes in enumerate(grid):
        axes.set_visible(i < count)
        axes.tick_params(labelbottom=i + across >= count)  # the lowest of its column
    canvas.axes = grid[0]
    return grid[:count]


def footnote(canvas: Canvas, text: str) -> None:
    """Write a note below the plots, such as what bars mean; call it after ``legend_below``."""
    if not text:
        return
    canvas.figure.set_size_inches(canvas.width, canvas.height + 0.2)
    if canvas.figure.legends:  # both would be at the bottom
        from matplotlib.font_manager import FontProperties

        legend = canvas.figure.legends[0]
        legend.set_title(printable(text, 200), prop=FontProperties(size=7.5))
        legend.get_title().set_color(GREY)
        legend.set_alignment("left")
    else:
        canvas.figure.supxlabel(printable(text, 200), x=0.01, ha="left", fontsize=7.5, color=GREY)


def legend_below(canvas: Canvas, handles: Sequence[Any], names: Sequence[str]) -> None:
    """Draw a legend below the plots, in as many columns as there is room for."""
    if not names:
        return
    longest = max(len(short(name)) for name in names)
    columns = max(1, min(len(names), int(canvas.width * 12 / (longest + 6))))
    canvas.frame(canvas.width, canvas.height + 0.2 * (math.ceil(len(names) / columns) - 1))
    legend = canvas.figure.legend(
        handles,
        [str(i) * longest for i in range(len(names))],
        loc="outside lower left",
        ncols=columns,
        frameon=False,
    )
    # set afterwards: matplotlib leaves out names that begin with an underscore
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(short(name))


def unfit(what: str, found: str, expected: str) -> UsageError:
    """Return the error for records of a setting that a figure cannot show."""
    return UsageError(
        "RECORD",
        f"{what} cannot be drawn from these records",
        found=found,
        expected=expected,
        fix="choose the records by their setting",
    )
