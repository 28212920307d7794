"""Baking: a weight source that composes each tensor when it is read.

Everything that reads a weight source reads this one: files and directories are written from it tensor by
tensor, with one block in memory beside the output.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from aniso.compose._engine.block_partition import WholeBlock
from aniso.compose._engine.coefficient_index import BlockCoefficients
from aniso.compose._engine.stacking import stack_deltas
from aniso.compose.card import RECORD, CardDetails, learned_on, model_card
from aniso.compose.card_metadata import Export
from aniso.compose.coefficients import Coefficients
from aniso.compose.export import write_model
from aniso.errors import InputError
from aniso.models.exported_files import home_of
from aniso.record_files import record_text
from aniso.records import Record
from aniso.vectors import Bank, Block, BlockSource
from aniso.vectors.block import tied_names
from aniso.weights import Ref, TensorInfo, WeightSource
from aniso.weights.dtypes import NAMES, TORCH, as_bytes, narrowed
from aniso.weights.files import ByteFile, Progress
from aniso.weights.licence import stated_licence


@final
class Baked(WeightSource):
    """The weights base + sum of coefficient * delta under the base's names, as a weight source.

    ``save`` writes an ordinary checkpoint::

        Baked("base.pt", bank, Coefficients.load("coefficients.safetensors")).save("model.safetensors")
    """

    def __init__(
        self,
        base: Ref | BlockSource,
        bank: Bank,
        coefficients: Coefficients,
        *,
        dtype: torch.dtype | None = None,
        any_base: bool = False,
        any_bank: bool = False,
    ) -> None:
        """``dtype`` is that of composed tensors; default: the base's. ``any_...`` skip a check."""
        coefficients.require_standard()
        chosen = coefficients.chosen(bank)
        self._given = coefficients
        self._coefficients = coefficients.for_bank(chosen, any_bank=any_bank)
        self._bank = chosen
        self._blocks = chosen.over(base, any_base=any_base)
        self._is_base = not any_base or self._blocks.identity().is_same_as(chosen.base)
        source = self._blocks.source
        self.label = source.label
        self.info = replace(source.info, format="composition", notes=())
        values = self._coefficients.index.divided(self._coefficients.values)
        self._entries = {
            entry.block.name: (entry, own)
            for entry, own in zip(self._coefficients.index.blocks, values, strict=True)
        }
        self._same = tied_names(source)
        self._tensors = {name: self._info(name, info, dtype) for name, info in source.tensors.items()}
        self._last: tuple[str, Tensor] = ("", torch.empty(0))

    def _info(self, name: str, info: TensorInfo, dtype: torch.dtype | None) -> TensorInfo:
        moves = dtype is not None and self._same.get(name, name) in self._blocks.layout.places
        return TensorInfo(NAMES[dtype], info.shape) if moves and dtype is not None else info

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @property
    def files(self) -> tuple[ByteFile, ...]:
        return self._blocks.source.files

    @property
    def aliases(self) -> Mapping[str, str]:
        return self._blocks.source.aliases

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self._tensors.values())

    def sha256(self, progress: Progress | None = None) -> str:
        """Return a hash of names and values, not of the base's file."""
        digest = hashlib.sha256()
        for name, info in sorted(self._tensors.items()):
            digest.update(f"{name}\0{info.dtype}\0{info.shape}\n".encode())
            digest.update(as_bytes(self.read(name)))
            if progress:
                progress(info.nbytes)
        return digest.hexdigest()

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
        """Write one safetensors file, or a directory; return notes.

        ``to`` is ``safetensors``; ``open_clip`` for a CLIP; ``huggingface`` for a CLIP, a language model or
        an image classifier; ``sentence-transformers`` for a sentence encoder; ``dual-encoder`` for one.
        Configuration, tokenizer and preprocessing come from the directory of the base.

        A directory also gets the coefficients and a model card, which says what ``details`` holds: the record
        of the run, a licence, the command. ``also`` are more files for it, by name, each with a sentence for
        the card.
        """
        about = details or CardDetails()
        about.require_record_of(self._given)
        base = self._bank.base.activation
        if activation and base not in (None, activation):
            raise InputError(
                "CKPT-ACTIVATION",
                "the bank's base has a different activation",
                expected=base,
                found=activation,
                fix=f"--activation {base}, or leave it out",
            )
        known = activation or (None if self.info.config.activation else base)
        files = {} if to == "safetensors" else self._extra_files(to, about, also or {})
        return write_model(
            self,
            Path(out),
            to,
            files,
            metadata=self._metadata(about.record),
            activation=known,
            overwrite=overwrite,
            progress=progress,
        )

    def _metadata(self, record: Record | None) -> dict[str, str]:
        """Return the story of the weights for a file that may be all there is."""
        return {
            "aniso.base": self._given.provenance.base.content,
            "aniso.bank": self._bank.whole_hash,
            "aniso.vectors": ",".join(self._given.vectors),
            "aniso.partition": str(self._given.partition),
            "aniso.coefficients": self._given.content_hash,
            **({"aniso.learned": learned_on(record)} if record is not None else {}),
        }

    def card_files(self, to: str, details: CardDetails) -> dict[str, bytes]:
        """Return the card, the coefficients and the record, as files of a directory of another kind."""
        details.require_record_of(self._given)
        return self._extra_files(to, details, {})

    def _extra_files(
        self, to: str, about: CardDetails, also: Mapping[str, tuple[bytes, str]]
    ) -> dict[str, bytes]:
        more = (*about.more, *(f"`{name}` {sentence}" for name, (_, sentence) in also.items()))
        licence = stated_licence(home_of(self._blocks.source))
        full = replace(about, more=more, base_licence=licence)
        card = model_card(self._given, self._bank, Export(to, self.info.config.architecture), full)
        out = {"README.md": card.encode(), "coefficients.safetensors": self._given.to_bytes()}
        if about.record is not None:
            out[RECORD] = record_text(about.record).encode()
        return out | {name: content for name, (content, _) in also.items()}

    def _load(self, name: str) -> Tensor:
        key = self._same.get(name, name)
        places = self._blocks.layout.places.get(key, ())
        same = self._tensors[name].dtype == self._blocks.source.tensors[name].dtype
        if same and not any(self._moves(place.block) for place in places):
            return self._blocks.source.read(name)
        pieces = []
        for place in places:
            values, part = self._composed(place.block), place.part
            rows = values[part.start : part.stop] if place.block.shape else values
            pieces.append(rows.T if part.transposed else rows)
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        dtype = TORCH[self._tensors[name].dtype]
        return narrowed(whole.contiguous(), dtype, "the composed weights", name).clone()

    def _moves(self, block: Block) -> bool:
        return block.name in self._entries and bool(self._entries[block.name][1].any())

    def _composed(self, block: Block) -> Tensor:
        """Return one composed block, cached for the next tensor: query, key and value may share a block."""
        if self._last[0] != block.name:
            self._last = ("", torch.empty(0))  # free the old block before the new one is composed
            values = self._blocks.read(block)
            if block.name in self._entries:
                values = self._added(values, *self._entries[block.name])
            self._last = (block.name, values)
        return self._last[1]

    def _added(self, values: Tensor, entry: BlockCoefficients, own: Tensor) -> Tensor:
        moving = [(vector, row) for vector, row in zip(entry.vectors, own, strict=True) if bool(row.any())]
        if len(moving) == 1 and isinstance(entry.partition, WholeBlock):
            vector, row = moving[0]
            delta = self._bank[vector][entry.block.name]
            if not self._is_base:
                delta = delta.without_exact()  # exact values are those of the bank's own base
            return delta.applied_to(values, float(row))  # 1 gives the tuned model bit for bit
        flat = values.view(-1)
        for vector, row in moving:
            # one vector at a time, so that one block is in memory beside the output
            delta = self._bank[vector][entry.block.name]
            for stack in stack_deltas(entry, {vector: delta}, {vector: 0}):
                stack.add_to(flat, row.unsqueeze(0).to(values.dtype), entry.partition)
        return values
