"""Texts as a model reads them, and how well it guesses them."""

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
    """How well tokens were guessed, each from those before it."""

    lost: float
    """The sum of -log p."""
    tokens: int
    right: int
    """Those that were thought the likeliest."""

    @property
    def loss(self) -> float:
        return self.lost / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))  # beyond that there is no such number

    @property
    def likelihood(self) -> float:
        """Of a token, as a geometric mean: one by the perplexity."""
        return math.exp(-self.loss)


def text_dataset(
    model: LanguageModel, examples: Sequence[Example], name: str, role: str = "", *, length: int | None = None
) -> TextDataset:
    """Examples as rows of tokens, none longer than ``length``, or than the model can read."""
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
    made = TextDataset(name, rows, places, length, role, notes)
    _require_guesses(made)
    return made


def _name(where: str) -> str:
    """Without directories: notes are part of records."""
    return where.rpartition("/")[2]


def _require_guesses(made: TextDataset) -> None:
    idle = [made.places[i] for i, (_, guessed) in enumerate(made.rows) if not bool((guessed >= 0).any())]
    if idle:
        raise InputError(
            "DATA-TEXT",
            f"{len(idle)} rows of {made.name} have no token to guess",
            first=printable(idle[0]),
            fix="texts of two tokens or more, or a prompt before them",
        )


@torch.no_grad()
def evaluate_lm(
    model: nn.Module,
    split: TextDataset,
    *,
    batch: int = TextDataset.default_batch_size,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> LanguageScore:
    """How well a model, or a composition, guesses a split."""
    device = next(language_model_of(model).parameters()).device
    before = model.training
    model.eval()
    done, total = 0, torch.zeros(3, dtype=torch.float64)
    try:
        for texts in Batches(split, Padded(split.length), size=batch, workers=workers):
            total += model(texts.views[0].to(device)).double().sum(0).cpu()
            done += len(texts)
            if progress:
                progress(split.name, done, len(split))
    finally:
        model.train(before)
    lost, tokens, right = total.tolist()
    if not math.isfinite(lost):
        raise NumericalError(
            "LEARN-NONFINITE",
            f"the loss on {split.name} is {lost}",
            fix="look for coefficients or weights that are too large: aniso coefficients show",
        )
    return LanguageScore(lost, int(tokens), int(right))
