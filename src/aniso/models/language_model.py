"""Language models of transformers: their loss on rows of tokens, and texts as such rows."""

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
"""Stands for no token: padding, or a position without a target."""
_PASSING = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
"""Fields of a configuration that do not change outputs."""
_LONGEST = 1 << 20  # for models that read any length


@final
class LanguageModel(Wrapped):
    """A network whose forward pass returns the loss of rows of tokens; ``load_language_model`` makes one."""

    def __init__(
        self, name: str, network: nn.Module, tokens: TextTokens, config: ModelConfig | None = None
    ) -> None:
        super().__init__(name, network, config)
        self.tokens = tokens

    @property
    def is_encoder_decoder(self) -> bool:
        """True for encoder-decoder models: the encoder reads the prompt, the decoder the completion."""
        return bool(getattr(self._config, "is_encoder_decoder", False))

    @property
    def _config(self) -> Any:
        return self._network.config

    @property
    def max_length(self) -> int:
        """The largest number of tokens that the model reads at once."""
        positions = getattr(self._config, "max_position_embeddings", None)
        if positions is None and not self.is_encoder_decoder:  # T5 has n_positions, but reads more
            positions = getattr(self._config, "n_positions", None)
        return positions if isinstance(positions, int) and positions > 0 else _LONGEST

    def forward(self, rows: Tensor) -> Tensor:
        """Return for (input, target) rows: the sum of -log p, the target count, the number correct."""
        inputs, targets = (_cut(rows[:, i]) for i in (0, 1))
        known = inputs != NOTHING
        arguments = {"input_ids": inputs.clamp(min=0), "attention_mask": known.long()}
        network: Any = self._network
        if self.is_encoder_decoder:
            labels = targets.masked_fill(targets == NOTHING, -100)
            begun = network.prepare_decoder_input_ids_from_labels(labels=labels)
            logits = network(**arguments, decoder_input_ids=begun, use_cache=False).logits
        else:
            width = inputs.shape[1]
            targets = functional.pad(targets, (0, max(0, width - targets.shape[1])), value=NOTHING)[:, 1:]
            logits = network(**arguments, use_cache=False).logits[:, :-1]
        losses = functional.cross_entropy(
            _wide(logits).flatten(0, 1), targets.flatten(), ignore_index=NOTHING, reduction="none"
        ).view(targets.shape)
        counted = targets != NOTHING
        right = (logits.argmax(-1) == targets) & counted
        return torch.stack([losses.sum(1), counted.sum(1), right.sum(1)], 1)

    def identity(self) -> JsonObject:
        """Return hashes of the weights, the configuration and the tokenizer, as JSON data."""
        said = {key: value for key, value in self._config.to_dict().items() if key not in _PASSING}
        config = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()
        return {"model": self.fingerprint, "config": config, "tokens": self.tokens.fingerprint}

    def rows(
        self, prompt: str | None, completion: str, length: int
    ) -> tuple[list[tuple[Tensor, Tensor]], bool]:
        """Return a text as rows of at most ``length`` tokens, and whether tokens were left out.

        The targets are the tokens of the completion; if prompt and completion are too long together, the
        prompt loses its beginning. A text without a prompt is all targets, in as many rows as needed.
        """
        if length < 2 or length > self.max_length:
            raise UsageError(
                "MODEL-LENGTH",
                f"'{printable(self.name)}' cannot read {length} tokens at once",
                expected=f"2 to {self.max_length:,}",
                fix=f"--length {min(512, self.max_length)}",
            )
        if self.is_encoder_decoder:
            return self._answered(prompt, completion, length)
        if prompt is None:
            return self._continued(completion, length), False
        before, after = self.tokens.opening(prompt), self.tokens.ending(completion)
        cut, after = len(before) + len(after) > length, after[:length]
        before = self._shortened(before, length - len(after))
        wanted = [NOTHING] * len(before) + after
        return [_row([*before, *after], [NOTHING, *wanted[1:]])], cut  # the first token has no context

    def _shortened(self, prompt: list[int], length: int) -> list[int]:
        """Return the end of a prompt; the beginning-of-sequence token is kept if there is room for it."""
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
                f"'{printable(self.name)}' is an encoder-decoder model: a text needs a prompt",
                fix='a file of lines {"prompt": "…", "completion": "…"}',
            )
        before, after = self.tokens.whole(prompt), self.tokens.ending(completion)
        return [_row(before[-length:], after[:length])], max(len(before), len(after)) > length

    def _continued(self, text: str, length: int) -> list[tuple[Tensor, Tensor]]:
        """Return rows in which every token but the first is a target once; rows overlap by one token."""
        tokens = self.tokens.opening("") + self.tokens.ending(text)
        starts = range(0, max(1, len(tokens) - 1), length - 1)
        pieces = [tokens[start : start + length] for start in starts]
        return [_row(piece, [NOTHING, *piece[1:]]) for piece in pieces]


def _row(inputs: list[int], targets: list[int]) -> tuple[Tensor, Tensor]:
    return torch.tensor(inputs, dtype=torch.int32), torch.tensor(targets, dtype=torch.int32)


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.element_size() < 4 else logits


def _cut(rows: Tensor) -> Tensor:
    """Cut off the columns at the end that have no token in any row."""
    used = (rows != NOTHING).any(0).nonzero()
    return rows[:, : int(used[-1]) + 1 if len(used) else 1]


@final
class TextTokens(LateTokenizer):
    """A tokenizer from a directory, in the format of the tokenizers library, which holds no code."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size

    def _read(self) -> TokenizerFile:
        reason = "there is none"
        if (self._path / "tokenizer.json").is_file():
            try:
                tokenizer = TokenizerFile.read(self._path, self._size)
            except TokenizerError as e:
                reason = f"damaged: {printable(e)}"
            else:
                if len(tokenizer) <= self._size:
                    return tokenizer
                reason = f"it has {len(tokenizer)} tokens"
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
        """Return ids with all special tokens that the model expects around a text."""
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def opening(self, text: str) -> list[int]:
        """Return ids with the beginning-of-sequence token, if the model has one, and no end token."""
        ids, around = self.whole(text), self.whole("")
        end, begin = self._tokenizer.eos_token_id, self._tokenizer.bos_token_id
        return ids[:-1] if around and around[-1] == end and end != begin else ids

    def ending(self, text: str) -> list[int]:
        """Return ids with the end-of-sequence token, if the model has one, and no beginning token."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        end = self._tokenizer.eos_token_id
        return ids if end is None else [*ids, int(end)]


def load_language_model(name: str | Path, weights: Ref | None = None) -> LanguageModel:
    """Load a causal or sequence-to-sequence model of transformers from a directory or a hub id.

    ``weights`` (a file, directory or hub id) replace those of the directory. Everything is read as data; no
    code from a model's repository is run::

        model = load_language_model("gpt2-tuned/")
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
    with torch.random.fork_rng([]):  # building initialises weights at random, which are then replaced
        network = filled(network_of(path, said, LANGUAGE_MODEL, source), source).float()
    if not network.config.is_encoder_decoder:
        _require_causal(path, network.eval())
    config, _ = transformers_config(said)
    tokens = TextTokens(path, int(network.get_input_embeddings().num_embeddings))
    model = LanguageModel(called, network, tokens, config)
    model.home = path
    return model


@torch.no_grad()
def _require_causal(path: Path, network: Any) -> None:
    """Raise for a model that sees its target tokens, such as BERT."""
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
            fix="use another base; a BERT needs is_decoder in config.json",
        )
