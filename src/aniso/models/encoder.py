"""An encoder of images or texts with what the method needs: class weights, views, layout, fingerprint."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from aniso.classes import ClassList
from aniso.errors import InputError, UsageError, printable
from aniso.json_value import JsonObject
from aniso.models.cache import WeightsCache
from aniso.models.head import ClassWeights, of_prompts
from aniso.models.stored_class_weights import require_names
from aniso.models.transforms import Pixels, Transforms
from aniso.models.wrapped import Wrapped
from aniso.progress import ProgressCallback
from aniso.vectors.block import Kind
from aniso.weights.fingerprint import combined_hash, tensor_hash
from aniso.weights.source import ModelConfig

_TEXTS = 256


class Tokens(Protocol):
    """The tokenizer of a model family."""

    @property
    def fingerprint(self) -> str:
        """A hash that changes whenever a text could give other ids."""
        ...

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, list[int]]:
        """Return ids of equal length, and the indices of texts that were truncated."""
        ...


class Views(Protocol):
    """The views of one model: how its items become inputs, for evaluation and for training."""

    @property
    def kind(self) -> str:
        """The items that the model takes: images or texts."""
        ...

    def identity(self) -> JsonObject:
        """Everything the views depend on, as JSON-serialisable data."""
        ...

    def notes(self, items: Any, name: str) -> tuple[str, ...]:
        """Return what a user should know about items as this model reads them."""
        ...

    def augmented(self, name: str) -> Any:
        """Return the view that self-training compares with the whole item."""
        ...

    @property
    def eval(self) -> Any: ...
    @property
    def train(self) -> Any: ...
    @property
    def few_shot(self) -> Any: ...
    @property
    def strong(self) -> Any: ...


@final
class FrozenNetwork:
    """A copy of the base's network that nothing composes into and nothing trains."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network.eval().requires_grad_(False)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of its weights."""
        state = self.network.state_dict()
        return combined_hash({key: tensor_hash(tensor.cpu()) for key, tensor in state.items()})


@dataclass(frozen=True)
class Family:
    """How to compute features with the networks of one library."""

    item: Callable[[Any, Tensor], Tensor]
    """Features of a batch of inputs: images or tokens."""
    text: Callable[[Any, Tensor], Tensor] | None = None
    tokens: Tokens | None = None
    own_head: Callable[[Any], tuple[Tensor, Tensor | None]] | None = None
    own_classes: tuple[str, ...] = ()
    frozen: FrozenNetwork | None = None
    """The network for ``text``, if the encoder's own is not frozen: a sentence encoder trains it."""
    logit_scale: float = 1.0
    """What cosines are multiplied by, if the network has no logit scale of its own."""
    stored: Mapping[str, ClassWeights] = field(default_factory=dict)
    """Class weights by ``ClassList.key`` that are used as they are, whatever the network would make."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Family:
        return self  # immutable


@final
class Encoder(Wrapped):
    """A network whose forward pass gives features of images or of texts.

    What class weights are made with is frozen and part of no task vector: the text tower of a CLIP, or a copy
    of a sentence encoder as it was loaded::

        model = load_model("mini")
        features = model(model.transforms.eval.finish(pixels))
        weights = model.class_weights(task.classes)
        logits = weights.logits(features)
    """

    def __init__(
        self,
        name: str,
        network: nn.Module,
        family: Family,
        views: Pixels | Views,
        config: ModelConfig | None = None,
    ) -> None:
        """``views`` are how items become inputs; for images, their size and normalisation are enough."""
        super().__init__(name, network, config)
        self.family = family
        self.transforms: Views = Transforms(views) if isinstance(views, Pixels) else views

    def forward(self, inputs: Tensor) -> Tensor:
        """Return features, one row per input; inputs are what ``transforms`` has finished."""
        return self.family.item(self._network, inputs)

    def identity(self) -> JsonObject:
        """Everything the model's outputs depend on: weights, class weights and views."""
        return {"model": self.fingerprint, "text": self.text_fingerprint, **self.transforms.identity()}

    @property
    def config_words(self) -> str:
        """Config values that change features but are not stored in the weights."""
        config = self.model_config
        return f"{config.activation} {config.heads} {config.unusual}"

    @property
    def logit_scale(self) -> float:
        """What cosines are multiplied by."""
        found = self._parameters.get("logit_scale")
        return math.exp(float(found.detach())) if found is not None else self.family.logit_scale

    # text

    @property
    def has_text(self) -> bool:
        return self.family.text is not None and self.family.tokens is not None

    @torch.no_grad()
    def text_features(self, texts: Sequence[str], progress: ProgressCallback | None = None) -> Tensor:
        """Return text features, one row per text, not normalised."""
        return self._texts(texts, progress)[0]

    def _texts(self, texts: Sequence[str], progress: ProgressCallback | None) -> tuple[Tensor, list[int]]:
        if self.family.text is None or self.family.tokens is None:
            raise UsageError(
                "MODEL-TEXT",
                f"'{self.name}' has no text tower",
                fix="use a complete CLIP as the base, or a classifier with its own head",
            )
        network = self._network if self.family.frozen is None else self.family.frozen.network
        device = next(network.parameters()).device
        order = _by_length(texts) if self.family.frozen is not None else list(range(len(texts)))
        rows, cut = [], []
        for start in range(0, len(texts), _TEXTS):
            group = order[start : start + _TEXTS]
            ids, short = self.family.tokens([texts[i] for i in group])
            rows.append(self.family.text(network, ids.to(device)).float().cpu())
            cut += [group[i] for i in short]
            if progress:
                progress("class weights", min(start + _TEXTS, len(texts)), len(texts))
        features = torch.cat(rows)
        return features[torch.tensor(order).argsort()], sorted(cut)

    @torch.no_grad()
    def class_weights(
        self,
        classes: ClassList,
        *,
        cache: WeightsCache | None = None,
        progress: ProgressCallback | None = None,
    ) -> ClassWeights:
        """Return class weights from prompts, or the rows of a classifier's own head, matched by class name.

        They are cached on disk, keyed by text tower, tokenizer, class names, prompts and logit scale. A baked
        sentence encoder has those of its run's classes in a file.
        """
        if not self.has_text and self.family.own_head is not None:
            return self._own_rows(classes)
        if (stored := self.family.stored.get(classes.key)) is not None:
            require_names(stored, classes.names, self.name)
            return stored
        cache = cache if cache is not None else WeightsCache.default()
        key = self._text_key(classes) if self.has_text else ""
        weights = cache.get(key, classes) if key else None
        if weights is None:
            weights = self._compute(classes, progress)
            cache.put(key, weights)
        return weights

    def _compute(self, classes: ClassList, progress: ProgressCallback | None) -> ClassWeights:
        texts = [text for row in classes.texts() for text in row]
        features, cut = self._texts(texts, progress)
        notes = (
            (f"{len(cut)} prompts were too long and cut, first: {printable(texts[cut[0]])}",) if cut else ()
        )
        shaped = features.view(len(classes), len(classes.prompts), -1)
        return of_prompts(shaped, classes.names, self.logit_scale, notes)

    @property
    def text_fingerprint(self) -> str:
        """A hash of everything but the classes that class weights depend on."""
        if self.has_text:
            return combined_hash(self._text_words())
        if self.family.own_head is None:
            return ""
        head = [t for t in self.family.own_head(self._network) if t is not None]
        return combined_hash({str(i): tensor_hash(t.detach().cpu()) for i, t in enumerate(head)})

    def _text_key(self, classes: ClassList) -> str:
        """Return a hash of everything that class weights depend on."""
        return combined_hash({**self._text_words(), "classes": classes.key})

    def _text_words(self) -> dict[str, str]:
        """Yield hashes of the text tower; not cached, because tensors can be changed in place unnoticed."""
        assert self.family.tokens is not None
        words = {"tokens": self.family.tokens.fingerprint, "config": self.config_words}
        if self.family.frozen is not None:
            views = json.dumps(self.transforms.identity(), sort_keys=True)
            scale = str(self.logit_scale)
            stored = {key: tensor_hash(own.weight) for key, own in self.family.stored.items()}
            words |= {"stored": combined_hash(stored)} if stored else {}
            return {**words, "text": self.family.frozen.fingerprint, "views": views, "scale": scale}
        blocks = [b for b in self.layout.outside if b.kind in (Kind.TEXT_TOWER, Kind.LOGIT_SCALE)]
        state = self.state_dict()
        tensors = {part.key: state[part.key] for block in blocks for part in block.parts}
        tensors = tensors or state  # a network with adapters in it has names of its own: all of it counts
        hashes = {key: tensor_hash(t.cpu()) for key, t in tensors.items()}
        return {**words, "text": combined_hash(hashes)}

    def _own_rows(self, classes: ClassList) -> ClassWeights:
        """Return the rows of the classifier's own head in the task's order, matched by name."""
        assert self.family.own_head is not None
        weight, bias = self.family.own_head(self._network)
        names = [_plain(name) for name in self.family.own_classes[: len(weight)]]
        counts = Counter(names)
        place = {name: i for i, name in enumerate(names) if counts[name] == 1}
        missing = [name for name in classes.names if _plain(name) not in place]
        if missing:
            raise InputError(
                "MODEL-CLASSES",
                f"'{self.name}' has its own head, in which {len(missing)} of the task's classes are missing "
                "or ambiguous",
                found=printable(", ".join(missing[:8])),
                expected=printable(", ".join(self.family.own_classes[:8])) + " …",
                fix="use a task with the classes it was trained for, or a CLIP",
            )
        rows = torch.tensor([place[_plain(name)] for name in classes.names])
        picked = None if bias is None else bias.detach()[rows].clone()
        return ClassWeights(classes.names, weight.detach()[rows].clone(), picked, by_angle=False)


def _by_length(texts: Sequence[str]) -> list[int]:
    """Return the indices of many texts by length, since a batch is as wide as its longest."""
    few = len(texts) <= _TEXTS
    return list(range(len(texts))) if few else sorted(range(len(texts)), key=lambda i: (len(texts[i]), i))


def _plain(name: str) -> str:
    return name.replace("_", " ").strip().casefold()
