"""A summary of a weight file for ``aniso inspect``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aniso.errors import InputError, printable
from aniso.json_value import JsonObject
from aniso.vectors.block import Layout
from aniso.vectors.block_source import BlockSource
from aniso.weights import PeftAdapter, WeightSource
from aniso.weights.files import Progress
from aniso.weights.fingerprint import tensor_hash


@dataclass(frozen=True)
class TensorSummary:
    """A tensor's name, dtype, shape and hash."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str = ""


@dataclass(frozen=True)
class SourceSummary:
    """The format, layout, tensors and hashes of a weight source."""

    label: str
    format: str
    nbytes: int
    notes: tuple[str, ...]
    calls: tuple[str, ...]
    classes: tuple[str, ...]
    layout: Layout
    tensors: tuple[TensorSummary, ...]
    activation: str | None = None
    revision: str | None = None
    sha256: str = ""
    fingerprint: str = ""

    @property
    def outside(self) -> int:
        return len(self.layout.outside)

    def to_json(self) -> JsonObject:
        """Return the summary as JSON data."""
        return {
            "label": self.label,
            "format": self.format,
            "bytes": self.nbytes,
            "notes": list(self.notes),
            "would_call": list(self.calls),
            "classes": list(self.classes),
            "activation": self.activation,
            "revision": self.revision,
            "sha256": self.sha256 or None,
            "fingerprint": self.fingerprint or None,
            "naming": self.layout.scheme,
            "blocks": [
                {
                    "name": b.name,
                    "kind": b.kind.value,
                    "depth": b.depth,
                    "shape": list(b.shape),
                    "tensors": [part.key for part in b.parts],
                }
                for b in self.layout.blocks
            ],
            "outside": [
                {"name": part.key, "kind": b.kind.value} for b in self.layout.outside for part in b.parts
            ],
            "tensors": [
                {
                    "name": t.name,
                    "dtype": t.dtype,
                    "shape": list(t.shape),
                    "sha256": t.sha256 or None,
                }
                for t in self.tensors
            ],
        }


def summarise_source(
    source: WeightSource,
    *,
    hashes: bool = False,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
) -> SourceSummary:
    """Summarise a source; with ``hashes``, read all of it and raise for NaN or infinity unless allowed."""
    adapter = isinstance(source, PeftAdapter)
    layout = Layout.of(source, scheme="plain" if adapter else "auto")
    sha256, fingerprint = "", ""
    values: dict[str, str] = {}
    notes: list[str] = []
    if hashes:
        sha256 = source.sha256(progress)
        for name, info in source.tensors.items():
            tensor = source.read(name)
            values[name] = tensor_hash(tensor)
            if info.is_float and (bad := int((~torch.isfinite(tensor)).sum())):
                notes.append(f"warning: {printable(name)} has {bad} values that are NaN or infinite")
        if notes and not allow_nonfinite:
            raise InputError(
                "WEIGHT-NONFINITE",
                f"'{source.label}' has values that are NaN or infinite",
                found=[note.removeprefix("warning: ") for note in notes[:8]],
                fix="find out why training diverged; --allow-nonfinite only to look",
            )
        if not adapter:
            fingerprint = BlockSource(source, finite=False).identity().content
    report = source.info.pickle
    return SourceSummary(
        source.label,
        source.info.format,
        source.nbytes,
        (*source.info.notes, *notes),
        report.calls if report else (),
        report.classes if report else (),
        layout,
        tuple(
            TensorSummary(name, info.dtype, info.shape, values.get(name, ""))
            for name, info in source.tensors.items()
        ),
        source.info.config.activation,
        source.info.revision,
        sha256,
        fingerprint,
    )
