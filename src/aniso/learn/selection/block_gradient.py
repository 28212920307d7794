"""The gradient of an objective by block, computed once and saved for workers that have no data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

from torch import Tensor

from aniso.errors import InputError, printable
from aniso.json_value import JsonObject
from aniso.learn.gradient import weight_gradient
from aniso.learn.objectives import Objective
from aniso.learn.objectives.objective import Term
from aniso.learn.selection.gradient_cache import gradient_identity
from aniso.models import Encoder, Wrapped
from aniso.progress import ProgressCallback
from aniso.vectors import BlockSource
from aniso.weights import SafetensorsFile, save_safetensors
from aniso.weights.files import RawFile
from aniso.weights.jsontext import JsonError, parse_object

_FORMAT = "aniso block gradient 1"


@final
@dataclass(frozen=True)
class BlockGradient:
    """The gradient of the base's blocks, and everything that it depends on."""

    blocks: Mapping[str, Tensor]
    identity: JsonObject
    """Model, base, objective, seed and content of the items."""

    @classmethod
    def of(
        cls,
        model: Wrapped,
        objective: Objective | Term,
        base: BlockSource,
        *,
        own: str = "",
        seed: int = 0,
        workers: int = 0,
        progress: ProgressCallback | None = None,
    ) -> Self:
        """Compute the gradient in one pass over the objective's items; ``base`` holds the model's weights.

        ``own`` is the name of the task's own vector, which is not to be chosen.
        """
        total = objective if isinstance(objective, Objective) else objective * 1.0
        found = weight_gradient(model, total, seed=seed, workers=workers, progress=progress)
        return cls(found.over(base.layout), cls.identity_of(model, total, base, own, seed))

    @staticmethod
    def identity_of(
        model: Wrapped, objective: Objective, base: BlockSource, own: str, seed: int
    ) -> JsonObject:
        """Return everything that the gradient depends on."""
        items = "images" if isinstance(model, Encoder) else "texts"
        more = {"base": base.identity().content, "items": items, "own": own}
        return parse_object(json.dumps({**gradient_identity(model, objective, seed), **more}).encode())

    @property
    def key(self) -> str:
        """A hash of the identity; scores of different gradients have different keys."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()

    @property
    def of_texts(self) -> bool:
        """True if it is a language model's."""
        return self.identity.get("items") == "texts"

    @property
    def own(self) -> str:
        """The name of the task's own vector."""
        return str(self.identity.get("own", ""))

    def require(self, identity: JsonObject, path: Path) -> None:
        """Raise unless this gradient, of a file, depends on the same."""
        odd = sorted(k for k in {*identity, *self.identity} if identity.get(k) != self.identity.get(k))
        if odd:
            raise InputError(
                "RUN-CHANGED",
                f"'{printable(path)}' is the gradient of another model, objective or seed",
                changed=printable(", ".join(odd)),
                fix="name another directory with --scores, or remove this one",
            )

    def require_base(self, base: BlockSource) -> None:
        """Raise unless the gradient is of this base."""
        found = base.identity().content
        if found != self.identity.get("base"):
            raise InputError(
                "BANK-BASE",
                f"the gradient was not computed with '{base.label}'",
                expected=str(self.identity.get("base"))[:16],
                found=found[:16],
                fix="give the --model that it was computed with",
            )

    def save(self, path: str | Path) -> None:
        """Write the gradient to a new safetensors file."""
        about = {"format": _FORMAT, "identity": json.dumps(self.identity, sort_keys=True)}
        tensors = {name: tensor.contiguous() for name, tensor in self.blocks.items()}
        save_safetensors(Path(path), tensors, about)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a gradient that ``save`` wrote."""
        file = SafetensorsFile(RawFile(Path(path)))
        try:
            if file.metadata.get("format") != _FORMAT:
                raise JsonError(f"format {file.metadata.get('format')}")
            identity = parse_object(file.metadata.get("identity", "").encode())
        except JsonError as e:
            raise InputError(
                "SCORES",
                f"'{file.label}' is not a saved gradient",
                reason=printable(e),
                fix="name another directory with --scores",
            ) from None
        return cls({name: file.read(name) for name in file.tensors}, identity)
