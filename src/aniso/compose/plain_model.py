"""Models without coefficients, written like compositions: a base as it is, or fine-tuned weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import final

from aniso.compose.card import RECORD, CardDetails, plain_card
from aniso.compose.card_metadata import Export
from aniso.compose.export import write_model
from aniso.models.exported_files import home_of
from aniso.record_files import record_text
from aniso.vectors import BlockSource
from aniso.weights import WeightSource
from aniso.weights.files import Progress
from aniso.weights.licence import stated_licence


@final
class PlainModel:
    """A base, or weights that were fine-tuned from it, for export with the classifier of a run::

    PlainModel(open_weights("base")).save("out", to="huggingface")
    """

    def __init__(self, source: WeightSource, *, tuned_from: BlockSource | None = None) -> None:
        """``source`` are all weights of the model; ``tuned_from`` is the base if they differ from it."""
        self.source = source
        self._blocks = BlockSource(source)
        self._base = tuned_from or self._blocks
        self._tuned = tuned_from is not None

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.source.tensors.values())

    @property
    def content(self) -> str:
        """A hash of the weights, as heads and records name it."""
        return self._blocks.identity().content

    def save(
        self,
        out: str | Path,
        *,
        to: str = "safetensors",
        activation: str | None = None,
        details: CardDetails | None = None,
        also: Mapping[str, tuple[bytes, str]] | None = None,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> tuple[str, ...]:
        """Write one safetensors file, or a directory, with the parameters of ``Baked.save``; return notes."""
        about, also = details or CardDetails(), also or {}
        more = tuple(f"`{name}` {sentence}" for name, (_, sentence) in also.items())
        about = replace(about, more=(*about.more, *more))
        files = {} if to == "safetensors" else self.card_files(to, about)
        files |= {} if to == "safetensors" else {name: content for name, (content, _) in also.items()}
        return write_model(
            self.source, Path(out), to, files, activation=activation, overwrite=overwrite, progress=progress
        )

    def card_files(self, to: str, details: CardDetails) -> dict[str, bytes]:
        """Return the card and the record, as files of a directory."""
        licence = stated_licence(home_of(self._base.source))
        export = Export(to, self.source.info.config.architecture, "finetune")
        full = replace(details, base_licence=licence)
        card = plain_card(self._base.identity(), self.content if self._tuned else None, export, full)
        out = {"README.md": card.encode()}
        if details.record is not None:
            out[RECORD] = record_text(details.record).encode()
        return out
