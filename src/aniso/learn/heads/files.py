"""New heads by name, and saved heads from files."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from aniso.errors import InputError, UsageError, printable
from aniso.learn.heads.head import FORMAT, SCHEMA, Head, HeadOption
from aniso.models import ClassWeights
from aniso.registry import HEADS
from aniso.weights import SafetensorsFile
from aniso.weights.files import RawFile
from aniso.weights.fingerprint import require_checksum


def new_head(name: str, base: ClassWeights, options: Mapping[str, HeadOption] | None = None) -> Head:
    """Return a new head that predicts as the class weights do, until it is trained.

    ``options`` are keyword arguments of the head's class, such as ``{"momentum": 0.0}`` for LP++.
    """
    HEADS.require(name, option="--head")
    head: Head = HEADS.get(name)(base, **(options or {}))
    return head


def head_options(name: str, given: Sequence[str] = ()) -> dict[str, HeadOption]:
    """Return all options of a head: its defaults, with the ``given`` ones (``momentum=0``) in their place."""
    HEADS.require(name, option="--head")
    parameters = inspect.signature(HEADS.get(name)).parameters.values()
    found = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    for pair in given:
        key, _, text = pair.partition("=")
        if key not in found:
            raise UsageError(
                "HEAD-OPTION",
                f"head '{name}' has no option '{printable(key)}'",
                expected=", ".join(f"{known}={value}" for known, value in found.items()),
                fix=f"--head-option {next(iter(found), 'NAME')}=VALUE",
            )
        found[key] = _converted(name, key, text, found[key])
    return found


def _converted(head: str, key: str, text: str, default: HeadOption) -> HeadOption:
    """An option's text as a value of its default's type."""
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        value = type(default)(text)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError
        return value
    except (KeyError, ValueError):
        raise UsageError(
            "HEAD-OPTION",
            f"invalid value '{printable(text)}' for option '{key}' of head '{head}'",
            expected="true or false" if isinstance(default, bool) else f"such as {default}",
            fix=f"--head-option {key}={default}",
        ) from None


@final
@dataclass(frozen=True)
class SavedHead:
    """A head from a file, and the identity of the features it was trained on."""

    head: Head
    features: Mapping[str, str]

    def require_features(self, found: Mapping[str, str], label: str) -> None:
        """Raise HEAD-FEATURES if features are of another model: predictions on them would be noise."""
        other = sorted(key for key in {*found, *self.features} if found.get(key) != self.features.get(key))
        if other:
            what = _WORDS.get(other[0], "model")
            raise InputError(
                "HEAD-FEATURES",
                f"the head in '{printable(label)}' was trained on features of another {what}",
                expected=printable(self.features.get(other[0], "none")),
                found=printable(found.get(other[0], "none")),
                fix="name the model, the bank and the coefficients that it was trained with",
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
    settings: dict[str, float | int | bool | str]
    features: dict[str, str]


def load_head(path: str | Path) -> SavedHead:
    """Read a head from a file that ``Head.save`` wrote."""
    file = SafetensorsFile(RawFile(Path(path)))
    if file.metadata.get("format") != FORMAT or file.metadata.get("schema") != str(SCHEMA):
        raise InputError(
            "HEAD-FILE",
            f"'{file.label}' is not a head, or was written by another version",
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
    if index.kind not in HEADS:
        raise LookupError(f"there is no head '{index.kind}'")
    defaults = head_options(index.kind)
    for key, value in index.settings.items():
        wanted = (int, float) if type(defaults.get(key)) is float else (type(defaults.get(key)),)
        if type(value) not in wanted:
            raise TypeError(f"'{key}' is not an option, or cannot be {value!r}")
    head: Head = HEADS.get(index.kind)(base, **index.settings)
    head.adopt(tensors)
    with torch.no_grad():
        head.logits(torch.zeros(1, base.weight.shape[1]))  # tensors that do not fit each other fail here
    return head


def _damaged(label: str, reason: str) -> InputError:
    return InputError(
        "HEAD-FILE",
        f"the head in '{label}' cannot be used",
        reason=printable(reason.splitlines()[0] if reason else "", 200),
        fix="train it again, or restore the file from a copy",
    )
