"""Sentence encoders: BERT-like networks of transformers with the pooling of sentence-transformers."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from aniso.errors import AnisoError, InputError, printable
from aniso.json_value import JsonObject
from aniso.models.architectures import SENTENCE_ENCODER
from aniso.models.encoder import Encoder, Family, FrozenNetwork
from aniso.models.loading import filled, network_of
from aniso.models.sentence_modules import MODULES, Pooling, SentenceModules, read_modules
from aniso.models.stored_class_weights import read_class_weights
from aniso.models.text_views import TextTransforms, Tokenised
from aniso.models.tokenizer_file import LateTokenizer, TokenizerError, TokenizerFile, backend_text
from aniso.weights import Ref, WeightSource, open_weights
from aniso.weights.directory import read_json, transformers_config
from aniso.weights.source import Renamed

LOGIT_SCALE = 40.0
"""What cosines are multiplied by: a temperature of 0.025. Sentence encoders have no logit scale of their own.

sentence-transformers trains with 20 by default. On 100 texts of four tasks (trec, sst2, finance, math_topic)
an untuned MiniLM has an accuracy of 0.50 to 0.65 and a mean confidence of 0.54 to 0.71 at 20, of 0.69 to 0.83
at 40: 20 is better calibrated, 40 sharper for objectives on unlabelled texts. Predictions are the same.
"""
_NOTHING = -1  # in the place of a token: padding
_KEPT = 1 << 16  # tokenised texts in memory; a text of 30 tokens takes about 1 kB
_SHIFTED = ("camembert", "mpnet", "roberta", "xlm-roberta")  # positions count from the padding token's id on
_HEADS = ("cls.", "lm_head.", "classifier.", "qa_outputs.", "vocab_transform.", "vocab_layer_norm.",
          "vocab_projector.", "pre_classifier.")  # fmt: skip
_PASSING = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures")


def recognises(path: Path) -> bool:
    """True if a directory holds a sentence encoder, or a plain network that can be one."""
    if (path / MODULES).is_file():
        return True
    if not (path / "config.json").is_file():
        return False
    kind = read_json(path / "config.json").get("model_type")
    return isinstance(kind, str) and kind in SENTENCE_ENCODER.model_types


def load_directory(path: Path, name: str, weights: Ref | None = None) -> Encoder:
    """Load the sentence encoder in a directory of sentence-transformers or transformers.

    ``weights`` from elsewhere, such as a fine-tuned copy, replace its own; class weights are always made by
    the directory's own weights, so that all models tuned from one base are compared with the same ones.
    A baked directory has the base's class weights of its run in a file.
    """
    modules = read_modules(path)
    if not (modules.network / "config.json").is_file():
        raise InputError(
            "MODEL-NAME",
            f"'{printable(modules.network)}' has no configuration, so nothing says which model it is",
            expected="config.json",
            fix="download the whole directory",
        )
    base = _network(modules.network, open_weights(modules.network))
    network = copy.deepcopy(base) if weights is None else _network(modules.network, open_weights(weights))
    tokens = SentenceTokens(
        modules.network, int(base.config.vocab_size), _length(modules, base.config), modules.lower
    )
    features = partial(_pooled, pooling=modules.pooling)
    stored = read_class_weights(path, int(base.config.hidden_size), LOGIT_SCALE)
    family = Family(
        features, features, tokens, frozen=FrozenNetwork(base), logit_scale=LOGIT_SCALE, stored=stored
    )
    plain = {key: value for key, value in base.config.to_dict().items() if key not in _PASSING}
    settings: JsonObject = {
        "tokens": tokens.fingerprint,
        "pooling": f"{modules.pooling.mode}{', normalised' if modules.pooling.normalise else ''}",
        "config": hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest(),
    }
    if isinstance(weights, str | Path):
        name = f"{name}:{Path(weights).name}"
    config, _ = transformers_config(read_json(modules.network / "config.json"))
    encoder = Encoder(name, network, family, TextTransforms(tokens, settings), config)
    encoder.home = modules.network
    return encoder


def _network(path: Path, source: WeightSource) -> Any:
    """Return the network with weights; a pooler that the file does not have is left out."""
    config = read_json(path / "config.json")
    with torch.random.fork_rng([]):  # building draws weights, which are then replaced
        network = network_of(path, config, SENTENCE_ENCODER, source)
    if getattr(network, "pooler", None) is not None and not any("pooler." in key for key in source.tensors):
        network.pooler = None
    made: nn.Module = filled(network, _body(source, network)).float()
    return made.eval()


def _body(source: WeightSource, network: Any) -> WeightSource:
    """Return the tensors of the network itself, without the prefix and the head of a larger model."""
    wanted = set(network.state_dict())
    for prefix in (f"{network.base_model_prefix}.", "0.auto_model.", "auto_model."):
        names = {key.removeprefix(prefix): key for key in source.tensors if key.startswith(prefix)}
        if wanted & set(names):
            rest = {key: key for key in source.tensors if not key.startswith((prefix, *_HEADS))}
            return Renamed(source, names | rest, source.info)
    heads = [key for key in source.tensors if key.startswith(_HEADS)]
    if not heads:
        return source
    return Renamed(source, {key: key for key in source.tensors if key not in heads}, source.info)


def _length(modules: SentenceModules, config: Any) -> int:
    """Return the most tokens of a text: the directory's limit, and never more than there are positions."""
    positions = int(config.max_position_embeddings)
    if config.model_type in _SHIFTED:
        positions -= int(config.pad_token_id or 0) + 1
    if modules.length is not None and modules.length > positions:
        raise InputError(
            "DIR-CONFIG",
            f"'{printable(modules.network)}' limits texts to more tokens than the model has positions for",
            key="max_seq_length",
            found=f"{modules.length:,}",
            expected=f"at most {positions:,}",
            fix="correct sentence_bert_config.json",
        )
    return modules.length or positions


def _pooled(network: Any, ids: Tensor, pooling: Pooling) -> Tensor:
    """Return the features of rows of tokens; ``-1`` is padding."""
    mask = ids != _NOTHING
    padding = int(network.config.pad_token_id or 0)
    hidden = network(input_ids=ids.masked_fill(~mask, padding), attention_mask=mask.long()).last_hidden_state
    return pooling(hidden, mask)


@final
class SentenceTokens(LateTokenizer):
    """The tokenizer of a directory, read as data; texts are cut to the model's limit."""

    def __init__(self, path: Path, size: int, length: int, lower: bool = False) -> None:
        self._path = path
        self._size = size
        self.length = length
        self._lower = lower
        self._known: dict[str, Tokenised] = {}

    def _read(self) -> TokenizerFile:
        reason = "there is none"
        if (self._path / "tokenizer.json").is_file():
            try:
                made = TokenizerFile.read(self._path, self._size)
                if len(made) <= self._size:
                    made.backend.enable_truncation(self.length)
                    return made
                reason = f"it has {len(made)} tokens"
            except TokenizerError as e:
                reason = f"damaged: {printable(e)}"
            except AnisoError:
                raise
            except Exception as e:  # of the tokenizers library, for a template longer than the limit
                reason = f"damaged: {printable(e)}"
        raise InputError(
            "MODEL-TOKENIZER",
            f"'{printable(self._path)}' has no tokenizer that fits the model",
            expected=f"tokenizer.json with at most {self._size} tokens",
            found=reason,
            fix="download the whole directory; or save the tokenizer in this format: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        )

    @property
    def fingerprint(self) -> str:
        """Changes whenever any text might give other ids."""
        text = backend_text(self._tokenizer.backend)
        return hashlib.sha256(f"{self.length} {self._lower}\n{text}".encode()).hexdigest()

    @property
    def mask_token(self) -> int | None:
        found: int | None = self._tokenizer.id_of("mask_token")
        return found

    def tokenise(self, text: str) -> Tokenised:
        """Return the tokens of a text, remembered for the next time."""
        found = self._known.get(text)
        if found is None:
            words = text.lower() if self._lower else text
            row = self._tokenizer.backend.encode(words)
            special = tuple(map(bool, row.special_tokens_mask))
            found = Tokenised(tuple(row.ids), special, bool(row.overflowing))
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[text] = found
        return found

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, list[int]]:
        """Return ids padded to the longest text, and which of the texts were cut."""
        rows = [self.tokenise(text) for text in texts]
        width = max((len(row.ids) for row in rows), default=0)
        padded = [[*row.ids, *[_NOTHING] * (width - len(row.ids))] for row in rows]
        return torch.tensor(padded, dtype=torch.long), [i for i, row in enumerate(rows) if row.cut]

    def __getstate__(self) -> JsonObject:
        return {**super().__getstate__(), "_known": {}}
