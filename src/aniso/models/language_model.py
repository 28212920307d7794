"""Language models of transformers: how well they guess texts, and texts as they read them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from aniso.errors import InputError, UsageError, printable
from aniso.json_value import JsonObject
from aniso.models.architectures import LANGUAGE_MODEL
from aniso.models.load import path_of
from aniso.models.loading import building, filled, network_of
from aniso.models.tokenizer_file import LateTokenizer, TokenizerError, TokenizerFile, backend_text
from aniso.models.wrapped import Wrapped
from aniso.weights import Ref, open_weights
from aniso.weights.directory import read_json, transformers_config
from aniso.weights.hub import fetch, looks_like_hub_id
from aniso.weights.source import ModelConfig

NOTHING = -1
"""In the place of a token."""
_PASSING = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
"""Words of a configuration that nothing depends on."""
_LONGEST = 1 << 20  # of models that can read any length


@final
class LanguageModel(Wrapped):
    """A network whose forward pass says, of every row of tokens, how well it guesses them."""

    def __init__(
        self, name: str, network: nn.Module, tokens: TextTokens, config: ModelConfig | None = None
    ) -> None:
        super().__init__(name, network, config)
        self.tokens = tokens

    @property
    def answers(self) -> bool:
        """Whether prompts are read by an encoder of their own, and completions given by a decoder."""
        return bool(getattr(self._config, "is_encoder_decoder", False))

    @property
    def _config(self) -> Any:
        return self._network.config

    @property
    def longest(self) -> int:
        """Tokens that it can read at once."""
        found = getattr(self._config, "max_position_embeddings", None)
        if found is None and not self.answers:  # T5 has n_positions, and can read more
            found = getattr(self._config, "n_positions", None)
        return found if isinstance(found, int) and found > 0 else _LONGEST

    def forward(self, rows: Tensor) -> Tensor:
        """Of rows (read, to be guessed): the sum of -log p, how many were guessed, and how many right."""
        read, guessed = (_cut(rows[:, i]) for i in (0, 1))
        known = read != NOTHING
        given = {"input_ids": read.clamp(min=0), "attention_mask": known.long()}
        network: Any = self._network
        if self.answers:
            labels = guessed.masked_fill(guessed == NOTHING, -100)
            begun = network.prepare_decoder_input_ids_from_labels(labels=labels)
            logits = network(**given, decoder_input_ids=begun, use_cache=False).logits
        else:
            width = read.shape[1]
            guessed = functional.pad(guessed, (0, max(0, width - guessed.shape[1])), value=NOTHING)[:, 1:]
            logits = network(**given, use_cache=False).logits[:, :-1]
        losses = functional.cross_entropy(
            _wide(logits).flatten(0, 1), guessed.flatten(), ignore_index=NOTHING, reduction="none"
        ).view(guessed.shape)
        counted = guessed != NOTHING
        right = (logits.argmax(-1) == guessed) & counted
        return torch.stack([losses.sum(1), counted.sum(1), right.sum(1)], 1)

    def identity(self) -> JsonObject:
        """Its weights, what is done with them, and how it reads texts."""
        said = {key: value for key, value in self._config.to_dict().items() if key not in _PASSING}
        config = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()
        return {"model": self.fingerprint, "config": config, "tokens": self.tokens.fingerprint}

    def rows(
        self, prompt: str | None, completion: str, length: int
    ) -> tuple[list[tuple[Tensor, Tensor]], bool]:
        """A text as rows of at most ``length`` tokens, and whether something had to be left out.

        A prompt is read, its completion guessed: if they are too long together, the prompt loses its
        beginning. A text without a prompt is guessed as a whole, in as many rows as it takes.
        """
        if length < 2 or length > self.longest:
            raise UsageError(
                "MODEL-LENGTH",
                f"'{printable(self.name)}' cannot read {length} tokens at once",
                expected=f"2 to {self.longest:,}",
                fix=f"--length {min(512, self.longest)}",
            )
        if self.answers:
            return self._answered(prompt, completion, length)
        if prompt is None:
            return self._continued(completion, length), False
        before, after = self.tokens.opening(prompt), self.tokens.ending(completion)
        cut, after = len(before) + len(after) > length, after[:length]
        before = self._shortened(before, length - len(after))
        wanted = [NOTHING] * len(before) + after
        return [_row([*before, *after], [NOTHING, *wanted[1:]])], cut  # nothing is before the first token

    def _shortened(self, prompt: list[int], length: int) -> list[int]:
        """Its end; the mark of a beginning stays where it is, if there is room for it."""
        marks = self.tokens.opening("")
        if len(prompt) <= length or len(marks) >= length:
            return prompt[max(0, len(prompt) - length) :]
        return [*marks, *prompt[len(prompt) - (length - len(marks)) :]]

    def _answered(
        self, prompt: str | None, completion: str, length: int
    ) -> tuple[list[tuple[Tensor, Tensor]], bool]:
        if prompt is None:
            raise InputError(
                "DATA-TEXT",
                f"'{printable(self.name)}' answers to prompts, and this text has none",
                fix='a file of lines {"prompt": "…", "completion": "…"}',
            )
        before, after = self.tokens.whole(prompt), self.tokens.ending(completion)
        return [_row(before[-length:], after[:length])], max(len(before), len(after)) > length

    def _continued(self, text: str, length: int) -> list[tuple[Tensor, Tensor]]:
        """Every token but the very first is guessed once; rows overlap by one token, which is only read."""
        tokens = self.tokens.opening("") + self.tokens.ending(text)
        starts = range(0, max(1, len(tokens) - 1), length - 1)
        pieces = [tokens[start : start + length] for start in starts]
        return [_row(piece, [NOTHING, *piece[1:]]) for piece in pieces]


def _row(read: list[int], guessed: list[int]) -> tuple[Tensor, Tensor]:
    return torch.tensor(read, dtype=torch.int32), torch.tensor(guessed, dtype=torch.int32)


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.element_size() < 4 else logits


def _cut(rows: Tensor) -> Tensor:
    """Without the columns at the end that have no token in any row."""
    used = (rows != NOTHING).any(0).nonzero()
    return rows[:, : int(used[-1]) + 1 if len(used) else 1]


@final
class TextTokens(LateTokenizer):
    """A tokenizer from a directory, in tokenizers' own format: nothing in it can run."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size

    def _read(self) -> TokenizerFile:
        reason = "there is none"
        if (self._path / "tokenizer.json").is_file():
            try:
                made = TokenizerFile.read(self._path, self._size)
            except TokenizerError as e:
                reason = f"damaged: {printable(e)}"
            else:
                if len(made) <= self._size:
                    return made
                reason = f"it has {len(made)} tokens"
        raise InputError(
            "MODEL-TOKENIZER",
            f"'{printable(self._path)}' has no tokenizer that fits the model",
            expected=f"tokenizer.json with at most {self._size} tokens",
            found=reason,
            fix="download the whole repository: hf download OWNER/NAME; or save one in this format: "
            "AutoTokenizer.from_pretrained(…).save_pretrained(DIR)",
        )

    @property
    def fingerprint(self) -> str:
        marks = (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id)
        return hashlib.sha256(f"{marks}\n{backend_text(self._tokenizer.backend)}".encode()).hexdigest()

    def whole(self, text: str) -> list[int]:
        """With all marks that the model expects around a text."""
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def opening(self, text: str) -> list[int]:
        """With the mark of a beginning, if the model has one, and none of an end."""
        found, around = self.whole(text), self.whole("")
        end, begin = self._tokenizer.eos_token_id, self._tokenizer.bos_token_id
        return found[:-1] if around and around[-1] == end and end != begin else found

    def ending(self, text: str) -> list[int]:
        """With the mark of an end, if the model has one, and none of a beginning."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        end = self._tokenizer.eos_token_id
        return found if end is None else [*found, int(end)]


def load_language_model(name: str | Path, weights: Ref | None = None) -> LanguageModel:
    """A causal or a sequence-to-sequence model of transformers, from a directory or a hub id.

    ``weights`` from elsewhere replace its own. Everything is read as data; no code is ever run.
    """
    path = path_of(str(name))
    called = path.resolve().name if path.is_dir() else str(name)
    if not path.is_dir() and looks_like_hub_id(str(name)):
        path = fetch(str(name)).path
    if not (path / "config.json").is_file():
        raise InputError(
            "MODEL-NAME",
            f"there is no language model '{printable(name)}'",
            expected="a directory with config.json, or a hub id owner/name",
            fix="name the directory of the base",
        )
    said = read_json(path / "config.json")
    source = open_weights(path if weights is None else weights)
    with torch.random.fork_rng([]):  # building draws weights, which are then replaced
        network = filled(network_of(path, said, LANGUAGE_MODEL, source), source).float()
    if not network.config.is_encoder_decoder:
        _require_causal(path, network.eval())
    config, _ = transformers_config(said)
    tokens = TextTokens(path, int(network.get_input_embeddings().num_embeddings))
    return LanguageModel(called, network, tokens, config)


@torch.no_grad()
def _require_causal(path: Path, network: Any) -> None:
    """A model that sees the token it has to guess, such as BERT, would guess far too well."""
    ids = torch.tensor([[0, 0], [0, 1]])
    with building(path):
        logits = network(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    one, other = logits[:, 0]
    if not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
        raise InputError(
            "MODEL-NAME",
            f"'{printable(path)}' holds no language model",
            found=f"{type(network).__name__}, which sees tokens that come later",
            expected="a causal or sequence-to-sequence model of transformers",
            fix="name another base; of a BERT one with is_decoder in config.json",
        )
