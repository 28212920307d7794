"""``open_weights``: a weight source from a path, a hub id or a state dict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from aniso.errors import InputError, printable
from aniso.weights.directory import open_directory
from aniso.weights.hub import fetch, looks_like_hub_id
from aniso.weights.memory import TensorMap
from aniso.weights.peft_lora import PeftAdapter, is_adapter, is_factor
from aniso.weights.single import open_file
from aniso.weights.source import WeightSource


@runtime_checkable
class HasWeights(Protocol):
    """A model with a method that returns its weights as a source."""

    def weight_source(self) -> WeightSource: ...


Ref = str | Path | Mapping[str, Tensor] | WeightSource | HasWeights
"""The types that ``open_weights`` accepts."""


def open_weights(ref: Ref, *, tensors_only: bool = False) -> WeightSource:
    """Open weights without reading them.

    ``ref`` is a file in any format (``FILE::entry`` for a part of a checkpoint), a model or adapter
    directory, a hub id ``owner/name[@revision]``, a state dict, or a model of ``load_model``.
    ``tensors_only`` also reads pickles that would call functions, which otherwise raise an error; nothing is
    called in either case::

        source = open_weights("model.pt")
        source.tensors["visual.proj"].shape
        tensor = source.read("visual.proj")
    """
    if isinstance(ref, WeightSource):
        return ref
    if isinstance(ref, HasWeights):
        return ref.weight_source()
    if isinstance(ref, Mapping):
        return TensorMap(ref)
    text, _, entry = str(ref).partition("::")
    try:
        return _open_named(text, entry, tensors_only)
    except (OSError, RuntimeError) as e:  # the latter for ~user of an unknown user
        raise InputError(
            "FILE-MISSING" if isinstance(e, RuntimeError) else "FILE-ACCESS",
            f"'{printable(text)}' cannot be opened",
            reason=getattr(e, "strerror", None) or str(e),
            fix=f"ls -l '{printable(text)}'",
        ) from None


def _open_named(text: str, entry: str, tensors_only: bool) -> WeightSource:
    path = Path(text).expanduser()
    if path.is_dir():
        source = _open_directory(path, tensors_only)
    elif path.exists() or path.is_symlink():
        source = _open_adapter_file(path, open_file(path, entry, tensors_only=tensors_only))
    elif looks_like_hub_id(text):
        fetched = fetch(text)
        source = _open_directory(fetched.path, tensors_only)
        source.label = f"{text.removeprefix('hub:').partition('@')[0]}@{fetched.commit[:12]}"
        source.info = replace(source.info, revision=fetched.commit)
    else:
        raise InputError(
            "FILE-MISSING",
            f"'{printable(text)}' does not exist",
            expected="a file, a directory, or a hub id owner/name[@revision]",
            fix=f"ls '{printable(path.parent)}'",
        )
    if entry and not source.info.format.startswith("torch"):
        raise InputError(
            "CKPT-NONE",
            f"'{printable(text)}' has no entries to choose from",
            found=printable(entry),
            expected="a file written by torch.save",
            fix=f"leave out ::{printable(entry, 40)}",
        )
    return source


def _open_directory(path: Path, tensors_only: bool) -> WeightSource:
    return PeftAdapter.open(path) if is_adapter(path) else open_directory(path, tensors_only=tensors_only)


def _open_adapter_file(path: Path, source: WeightSource) -> WeightSource:
    """Open LoRA factors with the configuration beside them; raises if there is none."""
    factors = [key for key in source.tensors if is_factor(key) or ".lora_down." in key]
    if not factors:
        return source
    if is_adapter(path.parent):
        return PeftAdapter.open(path.parent, path.name)
    raise InputError(
        "LORA-CONFIG",
        f"'{printable(path)}' holds LoRA factors without the configuration that gives their scale",
        key=factors[0],
        expected="adapter_config.json beside it, as PEFT writes it",
        fix="name the adapter's directory; convert kohya and other formats to PEFT first",
    )
