"""``aniso explain``."""

from __future__ import annotations

from typing import Annotated

import typer

from aniso.cli import show
from aniso.errors import EXPLANATIONS, UsageError


def explain(
    code: Annotated[str, typer.Argument(help="The code in brackets after 'error', such as CKPT-SHAPE.")],
) -> None:
    """Explain an error code."""
    text = EXPLANATIONS.get(code.upper())
    if text is None:
        raise UsageError(
            "USAGE",
            f"there is no error '{code}'",
            expected=", ".join(sorted(EXPLANATIONS)),
            fix="copy the code from between the brackets of an error",
        )
    show.line(text)
