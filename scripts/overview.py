"""Draw docs/assets/overview.png from committed records: coefficients as a heat map, results as a table.

    python scripts/overview.py

The table is also kept as text in the PNG, so that a test can compare it with the records.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from statistics import mean, stdev

from aniso.record_files import RecordStore
from aniso.records import Record

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "assets" / "overview.png"
LARGEST = 120_000
"""Bytes of the picture."""
BASES = {"MiniLM": "minilm-addition", "lite0": "lite0-addition", "mini": "addition"}
"""Experiments by base, in the order of the columns."""
ROWS = {
    "zero-shot": "zero-shot",
    "isotropic search": "one scale for all vectors, searched",
    "learned isotropic": "one learned coefficient per vector",
    "learned anisotropic": "one learned coefficient per vector and block",
    "own vector for each task": "eight fine-tuned models, one per task",
}
DRAWN = "lite0"
LEARNED = "learned anisotropic"


def finished(experiment: str, label: str) -> list[Record]:
    """Return the records of an experiment that have a label."""
    store = RecordStore(ROOT / "experiments" / experiment / "records")
    return [record for record in store.finished().values() if record.label == label]


def cell(experiment: str, label: str) -> str:
    """Return the mean accuracy over tasks in per cent, with its standard error over seeds."""
    runs = finished(experiment, label)
    values = [100 * mean(score.accuracy for score in run.metrics.accuracy.values()) for run in runs]
    spread = f" ± {stdev(values) / len(values) ** 0.5:.1f}" if len(values) > 1 else ""
    return f"{mean(values):.1f}{spread}"


def table() -> list[list[str]]:
    """Return the rows of the table, the head first."""
    head = ["one model for eight tasks, mean accuracy in %", *BASES]
    body = [[text, *(cell(name, label) for name in BASES.values())] for label, text in ROWS.items()]
    return [head, *body]


def draw() -> bytes:
    """Return the picture as a PNG that holds the table as text."""
    import numpy as np
    from matplotlib.figure import Figure

    from aniso.report.figures.coefficients import diverging_colours

    matrices = [run.coefficients.matrix for run in finished(BASES[DRAWN], LEARNED) if run.coefficients]
    found = [matrix for matrix in matrices if matrix is not None]
    values = np.mean([np.asarray(matrix.rows, dtype=float) for matrix in found], axis=0)
    limit = float(np.quantile(np.abs(values), 0.995))
    figure = Figure(figsize=(8.4, 5.4), dpi=160, layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(1.25, 1))
    image = above.imshow(
        values, cmap=diverging_colours(), vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest"
    )
    above.set_yticks(range(len(found[0].vectors)), found[0].vectors, fontsize=8)
    above.set_xticks([])
    above.set_xlabel(f"{values.shape[1]} parameter blocks of {DRAWN}, by name", fontsize=8)
    above.set_title("learned coefficients: one per task vector (rows) and block (columns)", fontsize=9)
    above.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=above, pad=0.01, aspect=18)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7)
    _write_table(below, table())
    out = io.BytesIO()
    figure.savefig(out, format="png", facecolor="white")
    return _smaller(out.getvalue())


def _write_table(axes: object, rows: list[list[str]]) -> None:
    axes.set_axis_off()  # type: ignore[attr-defined]
    drawn = axes.table(  # type: ignore[attr-defined]
        cellText=rows[1:], colLabels=rows[0], colWidths=[0.52, *(0.16 for _ in rows[0][1:])],
        cellLoc="right", loc="center", edges="horizontal",
    )  # fmt: skip
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(8.5)
    drawn.scale(1, 1.45)
    best = list(ROWS).index(LEARNED) + 1
    for (row, column), shown in drawn.get_celld().items():
        shown.set_edgecolor("#bbbbbb")
        shown.set_text_props(ha="left" if column == 0 else "right")
        if row in (0, best):
            shown.set_text_props(weight="bold")


def _smaller(png: bytes) -> bytes:
    """Return the picture with a palette, and the table in its text."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("table", json.dumps(table()))
    out = io.BytesIO()
    image = Image.open(io.BytesIO(png)).convert("RGB")
    few = image.quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(out, "PNG", optimize=True, pnginfo=info)
    return out.getvalue()


def main() -> None:
    """Draw the picture."""
    content = draw()
    if len(content) > LARGEST:
        sys.exit(f"{len(content):,} bytes")
    OUT.write_bytes(content)
    print(f"{OUT.relative_to(ROOT)}: {len(content):,} bytes")


if __name__ == "__main__":
    main()
