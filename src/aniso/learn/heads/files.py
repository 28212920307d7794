"""Heads by name, and from files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from aniso.errors import InputError, UsageError, printable
from aniso.learn.heads.head import FORMAT, SCHEMA, Head
from aniso.learn.heads.linear import LinearProbe
from aniso.learn.heads.lpp import LPP
from aniso.learn.heads.tip import TipAdapter
from aniso.models import ClassWeights
from aniso.weights import SafetensorsFile
from aniso.weights.files import RawFile
from aniso.weights.fingerprint import require_checksum

_HEADS: dict[str, type[Head]] = {head.kind: head for head in (TipAdapter, LPP, LinearProbe)}
HEADS = tuple(_HEADS)


def new_head(kind: str, base: ClassWeights) -> Head:
    """A head that answers as the class weights do, until it learns something."""
    if kind not in _HEADS:
        raise UsageError(
            "HEAD-FILE", f"there is no head '{printable(kind)}'", expected=", ".join(HEADS), fix="--head tip"
        )
    return _HEADS[kind](base)


@final
@dataclass(frozen=True)
class SavedHead:
    """A head, and what its features come from."""

    head: Head
    features: Mapping[str, str]

    def require_features(self, found: Mapping[str, str], label: str) -> None:
        """Refuse features of another model: they lie elsewhere, and answers would be noise."""
        other = sorted(key for key in {*found, *self.features} if found.get(key) != self.features.get(key))
        if other:
            what = _WORDS.get(other[0], "model")
            raise InputError(
                "HEAD-FEATURES",
                f"the head in '{printable(label)}' was learned on features of another {what}",
                expected=printable(self.features.get(other[0], "none")),
                found=printable(found.get(other[0], "none")),
                fix="name the model, the bank and the coefficients that it was learned with",
            )


_WORDS = {
    "model": "model",
    "bank": "bank",
    "partition": "composition",
    "coefficients": "composition",
    "linearised": "composition",
    "weights": "model",
}


class _Index(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: str
    classes: list[str]
    by_angle: bool
    settings: dict[str, float | int]
    features: dict[str, str]


def load_head(path: str | Path) -> SavedHead:
    """Read a file that ``Head.save`` wrote."""
    file = SafetensorsFile(RawFile(Path(path)))
    if file.metadata.get("format") != FORMAT or file.metadata.get("schema") != str(SCHEMA):
        raise InputError(
            "HEAD-FILE",
            f"'{file.label}' holds no head, or one that another version wrote",
            found=f"format {printable(file.metadata.get('format', 'none'), 40)}, "
            f"schema {printable(file.metadata.get('schema', 'none'), 20)}",
            expected=f"format '{FORMAT}', schema {SCHEMA}",
            fix="name a file that aniso fit … --head wrote",
        )
    try:
        index = _Index.model_validate_json(file.metadata.get("index", ""))
        tensors = {name: file.read(name) for name in file.tensors}
        require_checksum(file.metadata, tensors, file.label)
        return SavedHead(_built(index, tensors), index.features)
    except (ValidationError, LookupError, RuntimeError, TypeError, ValueError, ArithmeticError) as e:
        raise _damaged(file.label, str(e)) from None


def _built(index: _Index, tensors: dict[str, torch.Tensor]) -> Head:
    base = ClassWeights(
        tuple(index.classes), tensors["base_weight"], tensors.get("base_bias"), index.by_angle
    )
    if len(base.weight) != len(base.names) or len(set(base.names)) < len(base.names):
        raise ValueError(f"{len(base.names)} classes, {len(base.weight)} rows of class weights")
    odd = [n for n, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    if odd:
        raise ValueError(f"'{odd[0]}' is NaN or infinite")
    made: Any = _HEADS[index.kind]
    head: Head = made(base, **index.settings)
    head.adopt(tensors)
    with torch.no_grad():
        head.logits(torch.zeros(1, base.weight.shape[1]))  # tensors that do not fit each other fail here
    return head


def _damaged(label: str, reason: str) -> InputError:
    return InputError(
        "HEAD-FILE",
        f"the head in '{label}' cannot be used",
        reason=printable(reason.splitlines()[0] if reason else "", 200),
        fix="learn it again, or restore the file from a copy",
    )
