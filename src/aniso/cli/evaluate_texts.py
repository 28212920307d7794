"""aniso eval --texts: how well a language model, or a composition of its adapters, guesses texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aniso.cli import show

if TYPE_CHECKING:
    from torch import nn

    from aniso.data import TextDataset
    from aniso.models import LanguageModel


def texts_of(model: LanguageModel, files: Sequence[str], length: int | None) -> list[TextDataset]:
    from aniso.data import read_examples
    from aniso.learn import text_dataset

    return [
        text_dataset(model, read_examples(file), Path(file).name, "test", length=length) for file in files
    ]


def measured(
    model: LanguageModel,
    subject: nn.Module,
    identity: Mapping[str, str],
    texts: Sequence[TextDataset],
    *,
    batch: int,
    workers: int,
) -> list[dict[str, Any]]:
    """A record for each file; no paths, no dates, no host."""
    from aniso import __version__
    from aniso.learn import evaluate_lm

    rows = []
    for split in texts:
        with show.telling() as progress:
            found = evaluate_lm(subject, split, batch_size=batch, workers=workers, progress=progress)
        rows.append(
            {
                "model": model.name,
                "fingerprint": model.fingerprint,
                "tokenizer": model.tokens.fingerprint,
                **identity,
                "texts": split.name,
                "manifest": split.manifest,
                "length": split.length,
                "tokens": found.tokens,
                "right": found.correct,
                "loss": found.loss,
                "perplexity": found.perplexity,
                "notes": list(split.notes),
                "aniso": __version__,
            }
        )
    return rows


def show_rows(name: str, what: str, rows: Sequence[dict[str, Any]], *, json: bool) -> None:
    if json:
        show.as_json(list(rows))
        return
    for row in rows:
        show.notes([f"{row['texts']}: {note}" for note in row["notes"]])
    columns = ("texts", "tokens", "loss", "perplexity", "tokens right")
    lines = [
        (
            r["texts"],
            r["tokens"],
            f"{r['loss']:.3f}",
            f"{r['perplexity']:.2f}",
            f"{r['right'] / r['tokens']:.1%}",
        )
        for r in rows
    ]
    show.table(columns, lines, title=f"{name}: {what}")
