"""How texts become a model's input: whole, or with tokens masked and deleted for self-training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol, final

import torch
from torch import Tensor

from aniso.json_value import JsonObject


class TextSource(Protocol):
    """Texts that are opened by their index."""

    def __len__(self) -> int: ...

    def open(self, index: int, /) -> str: ...


@final
@dataclass(frozen=True)
class Tokenised:
    """The tokens of one text, special tokens included."""

    ids: tuple[int, ...]
    special: tuple[bool, ...]
    """True for tokens that the model's template adds, such as ``[CLS]``."""
    cut: bool
    """True if the text was longer than the model's limit."""


class Tokeniser(Protocol):
    """Turns a text into tokens, cut to the model's limit."""

    @property
    def length(self) -> int:
        """The most tokens that the model reads."""
        ...

    @property
    def mask_token(self) -> int | None:
        """The id that stands for a masked token."""
        ...

    def tokenise(self, text: str) -> Tokenised: ...


class _TextView:
    tokens: Tokeniser

    def finish(self, stack: Tensor) -> Tensor:
        """Return a padded stack of rows as the model takes it."""
        return stack.long()

    def lengths(self, items: TextSource) -> Sequence[int]:
        """Return the number of tokens of every text."""
        return [len(self.tokens.tokenise(items.open(i)).ids) for i in range(len(items))]


@final
@dataclass(frozen=True)
class WholeText(_TextView):
    """All tokens of a text up to the model's limit; nothing is random."""

    tokens: Tokeniser
    name: str = "eval"

    def __call__(self, text: str, rng: torch.Generator) -> Tensor:
        return torch.tensor(self.tokens.tokenise(text).ids, dtype=torch.int32)


@final
@dataclass(frozen=True)
class DroppedTokens(_TextView):
    """A text with some of its tokens masked or deleted; special tokens and at least one other stay."""

    tokens: Tokeniser
    share: float = 0.2
    """Probability that a token is dropped: half of these are masked, half deleted."""
    name: str = "strong"

    def __call__(self, text: str, rng: torch.Generator) -> Tensor:
        found = self.tokens.tokenise(text)
        draws = torch.rand(len(found.ids), generator=rng).tolist()
        free = [i for i, special in enumerate(found.special) if not special]
        kept = min(free, key=lambda i: -draws[i], default=-1)
        mask = self.tokens.mask_token
        ids = []
        for i, (token, draw) in enumerate(zip(found.ids, draws, strict=True)):
            if found.special[i] or i == kept or draw >= self.share:
                ids.append(token)
            elif draw < self.share / 2 and mask is not None:
                ids.append(mask)
        return torch.tensor(ids, dtype=torch.int32)


@final
@dataclass(frozen=True)
class TextTransforms:
    """The views of one sentence encoder."""

    tokens: Tokeniser
    settings: JsonObject = field(default_factory=dict)
    """What features depend on beside weights: tokenizer, pooling, configuration."""
    kind: ClassVar[str] = "texts"
    """The items that the model takes."""

    def identity(self) -> JsonObject:
        """Everything the views depend on, as JSON-serialisable data."""
        return dict(self.settings)

    def notes(self, items: TextSource, name: str) -> tuple[str, ...]:
        """Return the number of texts that are cut to the model's limit, if there are any."""
        cut = sum(self.tokens.tokenise(items.open(i)).cut for i in range(len(items)))
        if not cut:
            return ()
        return (f"{name}: {cut:,} of {len(items):,} texts are longer than {self.tokens.length} tokens: cut",)

    def augmented(self, name: str) -> DroppedTokens:
        """Return the view that self-training compares with the whole text, the strong one by any name.

        The other views are the whole text, which would be compared with itself.
        """
        return self.strong

    @cached_property
    def eval(self) -> WholeText:
        """Also the weak view of self-training on test texts."""
        return WholeText(self.tokens)

    @cached_property
    def train(self) -> WholeText:
        return WholeText(self.tokens, name="train")

    @cached_property
    def few_shot(self) -> WholeText:
        return WholeText(self.tokens, name="few-shot")

    @cached_property
    def strong(self) -> DroppedTokens:
        return DroppedTokens(self.tokens)
