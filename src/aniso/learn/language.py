"""Text datasets for a language model, and its score on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from aniso.data import Batches, TextDataset
from aniso.data.text_dataset import Example, Padded
from aniso.errors import InputError, NumericalError, printable
from aniso.learn.unwrap import language_model_of
from aniso.models import LanguageModel
from aniso.progress import ProgressCallback

LENGTH = 512


@final
@dataclass(frozen=True)
class LanguageScore:
    """How well a language model predicts tokens, each from those before it."""

    total_loss: float
    """Sum of -log p over all tokens."""
    tokens: int
    correct: int
    """Tokens that were the most likely prediction."""

    @property
    def loss(self) -> float:
        """Mean -log p of a token."""
        return self.total_loss / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))  # a float holds no larger number

    @property
    def likelihood(self) -> float:
        """Geometric mean of p(token), which is 1 / perplexity."""
        return math.exp(-self.loss)


def text_dataset(
    model: LanguageModel, examples: Sequence[Example], name: str, role: str = "", *, length: int | None = None
) -> TextDataset:
    """Tokenise examples into rows of at most ``length`` tokens (default: 512, or what the model can read)."""
    length = min(LENGTH, model.max_length) if length is None else length
    rows, places, short = [], [], []
    for example in examples:
        try:
            found, cut = model.rows(example.prompt, example.completion, length)
        except InputError as e:
            if e.code == "DATA-TEXT":
                e.facts = {"where": example.where, **e.facts}
            raise
        rows += found
        places += [example.where] * len(found)
        short += [example.where] if cut else []
    notes: tuple[str, ...] = ()
    if short:
        often = "1 example is" if len(short) == 1 else f"{len(short)} examples are"
        notes = (f"{often} longer than {length} tokens and cut, first: {_name(short[0])}",)
    dataset = TextDataset(name, rows, places, length, role, notes)
    _require_targets(dataset)
    return dataset


def _name(where: str) -> str:
    """The file's name without directories: notes are part of records."""
    return where.rpartition("/")[2]


def _require_targets(dataset: TextDataset) -> None:
    empty = [
        dataset.places[i] for i, (_, targets) in enumerate(dataset.rows) if not bool((targets >= 0).any())
    ]
    if empty:
        raise InputError(
            "DATA-TEXT",
            f"{len(empty)} rows of {dataset.name} have no token to predict",
            first=printable(empty[0]),
            fix="texts of two tokens or more, or a prompt before them",
        )


@torch.no_grad()
def evaluate_lm(
    model: nn.Module,
    split: TextDataset,
    *,
    batch_size: int = TextDataset.default_batch_size,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> LanguageScore:
    """Return how well a language model, or a composition of one, predicts a text dataset."""
    device = next(language_model_of(model).parameters()).device
    before = model.training
    model.eval()
    done, total = 0, torch.zeros(3, dtype=torch.float64)
    try:
        for texts in Batches(split, Padded(split.length), size=batch_size, workers=workers):
            total += model(texts.views[0].to(device)).double().sum(0).cpu()
            done += len(texts)
            if progress:
                progress(split.name, done, len(split))
    finally:
        model.train(before)
    total_loss, tokens, correct = total.tolist()
    if not math.isfinite(total_loss):
        raise NumericalError(
            "LEARN-NONFINITE",
            f"the loss on {split.name} is {total_loss}",
            fix="look for coefficients or weights that are too large: aniso coefficients show",
        )
    return LanguageScore(total_loss, int(tokens), int(correct))
