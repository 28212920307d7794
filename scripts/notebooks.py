"""Run the notebooks in examples/ and keep what they print.

    python scripts/notebooks.py [NAME...]

Code cells run in order in one namespace, in plain Python: no kernel, so no magics and no `await`. What a cell
prints, and the value of its last line, are kept as its outputs; a value with a PNG form is kept as a picture.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

PLACE = Path(__file__).parents[1] / "examples"
LARGEST = 100_000
"""Bytes of a notebook with its outputs."""


def run(path: Path) -> str:
    """Return the notebook's text with new outputs; cells run in an empty directory."""
    notebook = json.loads(path.read_text())
    scope: dict[str, Any] = {"__name__": "__main__"}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        try:
            code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
            for number, cell in enumerate(code, 1):
                cell["execution_count"] = number
                name = f"{path.name}, cell {number}"
                cell["outputs"] = _outputs("".join(cell["source"]), name, scope, number)
        finally:
            os.chdir(before)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _outputs(source: str, name: str, scope: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Run a cell; its last line, if it is an expression, gives a value."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), scope)  # noqa: S102
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), scope)  # noqa: S307
    out: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        out.append({"name": "stdout", "output_type": "stream", "text": text})
    if value is not None:
        shown = {"data": _data(value), "execution_count": number, "metadata": {}}
        out.append({**shown, "output_type": "execute_result"})
    return out


def _data(value: Any) -> dict[str, Any]:
    png = getattr(value, "_repr_png_", None)
    if png is None:
        return {"text/plain": [repr(value)]}
    return {"image/png": base64.b64encode(png()).decode(), "text/plain": [f"<{type(value).__name__}>"]}


def main(names: list[str]) -> None:
    """Run the named notebooks, or all, and write them back."""
    for path in sorted(PLACE.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        text = run(path)
        if len(text) > LARGEST:
            sys.exit(f"{path.name}: {len(text):,} bytes")
        path.write_text(text)
        print(f"{path.name}: {len(text):,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
