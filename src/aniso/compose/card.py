"""Model cards: the vectors, coefficients and command that made a composition."""

from __future__ import annotations

import re
from collections.abc import Iterable

from aniso.compose.coefficients import Coefficients
from aniso.errors import printable
from aniso.vectors import Bank

_MARKUP = re.compile(r"([\\`*_{}\[\]<>|#&~$])")
_ROWS = 200


def model_card(coefficients: Coefficients, bank: Bank, *, command: str = "", more: Iterable[str] = ()) -> str:
    """Return Markdown with the front matter that model hubs read.

    ``more`` are sentences about other files in the directory.
    """
    base, provenance = _line(coefficients.provenance.base.label), coefficients.provenance
    return "\n".join(
        [
            "---",
            "tags: [aniso, task-vectors, model-merging]",
            "---",
            "",
            f"# A composition of {len(coefficients.vectors)} task vectors over {base}",
            "",
            "The weights are base + Σ coefficient · task vector, with "
            f"{coefficients.partition} ({len(coefficients):,} in all). They are ordinary weights: "
            "nothing but the architecture's own library is needed to run them. "
            "`coefficients.safetensors` holds every coefficient, with the names it belongs to.",
            "",
            *(line for sentence in more for line in (sentence, "")),
            *_vectors(coefficients, bank),
            "",
            f"- base: {base}, content `{provenance.base.content}`",
            f"- bank: content `{provenance.bank}`",
            *([f"- vectors selected by {_line(coefficients.selection)}"] if coefficients.selection else []),
            # between backticks nothing needs escaping, and nothing may end them
            *([f"- command: `{printable(command, 2000).replace('`', '')}`"] if command else []),
            "",
            "Method: Knowledge Composition using Task Vectors with Learned Anisotropic Scaling "
            "(NeurIPS 2024), https://arxiv.org/abs/2407.02880",
            "",
        ]
    )


def factors_card(bank: Bank, *, command: str = "") -> str:
    """Return the card of adapters that were composed factor by factor."""
    names = ", ".join(_line(name) for name in bank.names[:_ROWS])
    return "\n".join(
        [
            "---",
            "tags: [aniso, task-vectors, model-merging]",
            "---",
            "",
            f"# {len(bank)} LoRA adapters over {_line(bank.base.label)}, composed factor by factor",
            "",
            "The update is (Σ b · B)(Σ a · A), with learned coefficients for the factors A and B of every "
            "adapter and weight. It is an ordinary adapter for PEFT, of the rank that each of them has.",
            "",
            f"- adapters: {names}",
            f"- base: {_line(bank.base.label)}, content `{bank.base.content}`",
            f"- bank: content `{bank.content_hash}`",
            *([f"- command: `{printable(command, 2000).replace('`', '')}`"] if command else []),
            "",
        ]
    )


def _vectors(coefficients: Coefficients, bank: Bank) -> Iterable[str]:
    yield "| vector | made from | sha256 | mean coefficient | least | most |"
    yield "|---|---|---|---|---|---|"
    rows = list(zip(coefficients.vectors, coefficients.matrix(), strict=True))
    for name, row in rows[:_ROWS]:
        known = row[~row.isnan()].tolist() or [0.0]
        numbers = " | ".join(f"{x:+.3f}" for x in (sum(known) / len(known), min(known), max(known)))
        source = bank[name].provenance
        yield f"| {_line(name)} | {_line(source.source)} | `{source.sha256[:16]}` | {numbers} |"
    if len(rows) > _ROWS:
        yield f"| … {len(rows) - _ROWS} more | | | | | |"


def _line(text: str, longest: int = 120) -> str:
    """Return untrusted text on one line, without markup and without directories."""
    shown = text.rsplit("/", 1)[-1] if text.startswith(("/", "~", ".")) else text
    return _MARKUP.sub(r"\\\1", printable(shown, longest))
