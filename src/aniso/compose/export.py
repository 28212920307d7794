"""Models as files and directories with everything that other libraries need beside the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aniso.models.exported_files import ExportedFiles, exported_files
from aniso.vectors.convert import Extras, convert
from aniso.weights import WeightSource
from aniso.weights.files import Progress


def write_model(
    source: WeightSource,
    out: Path,
    to: str,
    files: Mapping[str, bytes],
    *,
    metadata: Mapping[str, str] | None = None,
    activation: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> tuple[str, ...]:
    """Write weights as one safetensors file, or as a directory of kind ``to``; return notes.

    A directory gets configuration, tokenizer and preprocessing from that of the source, and ``files``.
    """
    beside = ExportedFiles() if to == "safetensors" else exported_files(source, to)
    notes = convert(
        source,
        out,
        to=to,
        activation=activation,
        overwrite=overwrite,
        progress=progress,
        extras=Extras(metadata or {}, {**beside.files, **files}, beside.config),
    )
    return (*notes, *beside.notes)
