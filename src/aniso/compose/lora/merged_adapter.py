"""Merges a composition into one LoRA adapter, sum of coefficient * B A, in PEFT's format.

The concatenated factors of all vectors are exact, also with negative coefficients: these scale one factor,
not both. With a smaller rank the largest singular values are kept, and the relative error is reported.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from aniso.compose._engine.block_partition import ColumnParts, ComponentParts, ElementPartition, RowParts
from aniso.compose._engine.coefficient_index import BlockCoefficients
from aniso.compose._engine.stacking import decomposed_deltas
from aniso.compose.card import RECORD, CardDetails, factors_card, model_card
from aniso.compose.card_metadata import PEFT, Export
from aniso.compose.coefficients import Coefficients
from aniso.compose.lora.adapter_base import AdapterBase
from aniso.errors import InputError, UsageError, printable
from aniso.json_value import JsonObject
from aniso.record_files import record_text
from aniso.vectors import Bank, Block, BlockSource, Delta, Dense, Kind, LowRank, Part
from aniso.weights import Ref, save_safetensors
from aniso.weights.atomic import atomic_directory, write_text
from aniso.weights.files import Progress
from aniso.weights.licence import stated_licence

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_NOTHING = 1e-7  # of the largest singular value: zero within float32's precision


@final
@dataclass(frozen=True)
class LayerUpdate:
    """The update ``b @ a`` of one layer's weight, outputs by inputs."""

    b: Tensor
    a: Tensor

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def padded(self, rank: int) -> LayerUpdate:
        """Return the same update with rows and columns of zeros up to a rank."""
        more = rank - self.rank
        b = torch.cat([self.b, self.b.new_zeros(self.b.shape[0], more)], 1)
        return LayerUpdate(b, torch.cat([self.a, self.a.new_zeros(more, self.a.shape[1])]))

    def oriented(self, blocks: BlockSource, module: str, part: Part) -> LayerUpdate:
        """Return the update as outputs by inputs, whatever the order in the block and the layer."""
        return LayerUpdate(self.a.T, self.b.T) if inputs_first(blocks, module) != part.transposed else self


@final
@dataclass(frozen=True)
class MergedAdapter:
    """A LoRA adapter with one update for each layer that the composition changes."""

    updates: Mapping[str, LayerUpdate]
    """Updates by the name of the layer."""
    error: float
    """Norm of what a smaller rank leaves out, relative to the norm of all updates; 0 if exact."""
    fan_in_fan_out: bool
    base: AdapterBase
    coefficients: Coefficients | None
    """Coefficients of whole updates; None for coefficients of factors, which fit no bank on disk."""
    bank: Bank

    @property
    def ranks(self) -> dict[str, int]:
        return {module: update.rank for module, update in self.updates.items()}

    def padded(self, rank: int) -> MergedAdapter:
        """Return the same adapter with one rank in all layers, so that PEFT can swap it for another."""
        most = max(self.ranks.values())
        if rank < most:
            raise UsageError(
                "USAGE",
                f"an adapter of rank {most} cannot be padded to rank {rank}",
                expected=f"{most} or more",
                fix=f"--pad-rank {most}, or --rank {rank} to leave out what is smallest",
            )
        return replace(self, updates={module: update.padded(rank) for module, update in self.updates.items()})

    def config(self, base_model: str | None = None) -> JsonObject:
        """Return PEFT's configuration; alpha is the rank, since PEFT multiplies by alpha / rank."""
        ranks = self.ranks
        most = max(ranks.values())
        other = {_pattern(module, ranks): rank for module, rank in ranks.items() if rank != most}
        base = self.base if base_model is None else replace(self.base, name=base_model)
        return {
            "peft_type": "LORA",
            **base.settings(),
            "inference_mode": True,
            "r": most,
            "lora_alpha": most,
            "rank_pattern": other,
            "alpha_pattern": other,
            "target_modules": sorted(ranks),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": self.fan_in_fan_out,
            "modules_to_save": None,
        }

    def save(
        self, directory: str | Path, *, details: CardDetails | None = None, overwrite: bool = False
    ) -> None:
        """Write a directory that ``peft`` loads, with a model card, the coefficients and the tokenizer."""
        about = details or CardDetails()
        if self.coefficients is not None:
            about.require_record_of(self.coefficients)
        tensors = {}
        for module, update in self.updates.items():
            tensors[f"base_model.model.{module}.lora_A.weight"] = update.a.contiguous()
            tensors[f"base_model.model.{module}.lora_B.weight"] = update.b.contiguous()
        with atomic_directory(Path(directory), overwrite=overwrite) as place:
            save_safetensors(place / _WEIGHTS, tensors, {"format": "pt"})
            config = self.config(about.base_model)
            write_text(place / _CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")
            write_text(place / "README.md", self._card(about))
            for name, content in self.base.tokenizer().items():
                (place / name).write_bytes(content)
            if about.record is not None:
                write_text(place / RECORD, record_text(about.record))
            if self.coefficients is not None:
                self.coefficients.save(place / "coefficients.safetensors")

    def _card(self, about: CardDetails) -> str:
        export = Export(PEFT, self.base.architecture)
        licence = stated_licence(self.base.home)
        if self.coefficients is None:
            return factors_card(self.bank, export, replace(about, base_licence=licence))
        lost = f" Fewer ranks than the sum has lose {self.error:.2%} of it." if self.error else ""
        note = f"Here they are written as a LoRA adapter for PEFT.{lost}"
        full = replace(about, base_licence=licence, more=(*about.more, note))
        return model_card(self.coefficients, self.bank, export, full)


@final
@dataclass(frozen=True)
class _Truncated:
    """An update of a given rank, with the squared norms of what it leaves out and of everything."""

    update: LayerUpdate
    lost: float
    whole: float


def _pattern(module: str, modules: Iterable[str]) -> str:
    """Return a pattern for one module: PEFT matches the ends of names unless a pattern starts with ^."""
    is_end = any(other.endswith(f".{module}") for other in modules)
    return f"^{re.escape(module)}" if is_end else module


def merge_adapters(
    base: Ref | BlockSource,
    bank: Bank,
    coefficients: Coefficients,
    *,
    rank: int | None = None,
    any_base: bool = False,
    any_bank: bool = False,
    progress: Progress | None = None,
) -> MergedAdapter:
    """Return a composition as one adapter of its base.

    Without a ``rank`` all vectors must be low-rank, and the result is exact. With a ``rank``, any vectors
    work that change the weights of linear layers alone. The base's configuration tells which layers store
    inputs first, as GPT-2's do.
    """
    if rank is not None and rank < 1:
        raise UsageError(
            "USAGE", f"an adapter cannot have rank {rank}", expected="1 or more", fix="--rank 16"
        )
    coefficients.require_standard()
    chosen = coefficients.chosen(bank)
    own = coefficients.for_bank(chosen, any_bank=any_bank)
    blocks = chosen.over(base, any_base=any_base)
    updates: dict[str, LayerUpdate] = {}
    lost = whole = 0.0
    for entry, values in zip(own.index.blocks, own.index.divided(own.values), strict=True):
        if bool(values.any()):
            deltas: Mapping[str, Delta] = chosen.only(*entry.vectors).read_block(
                entry.block.name, exact=False
            )
            if isinstance(entry.partition, ComponentParts):
                deltas = decomposed_deltas(entry, deltas)
            for module, part in layers_of(blocks, blocks.layout.by_name[entry.block.name]):
                update = _layer(entry, values, deltas, part, rank)
                if update is not None:
                    lost, whole = lost + update.lost, whole + update.whole
                    updates[module] = update.update.oriented(blocks, module, part)
        if progress:
            progress(4 * entry.block.numel)
    if not updates:
        raise InputError(
            "COEF-VALUES",
            "all coefficients are zero: there is nothing to write as an adapter",
            fix="use the base itself",
        )
    turned = any(inputs_first(blocks, module) for module in updates)
    error = math.sqrt(lost / whole) if whole else 0.0
    return MergedAdapter(
        updates, error, turned, AdapterBase.of(blocks, chosen.base.label), coefficients, chosen
    )


_CONV1D_MODELS = ("gpt2", "openaigpt", "imagegpt", "decisiontransformer", "clvp")
"""Prefixes of the architectures that use transformers' Conv1D."""
_CONV1D_LAYERS = ("c_attn", "q_attn", "c_proj", "c_fc")


def inputs_first(blocks: BlockSource, module: str) -> bool:
    """Return True if a layer stores inputs by outputs, as GPT-2's do; only the architecture tells."""
    architecture = (blocks.source.info.config.architecture or "").lower()
    return architecture.startswith(_CONV1D_MODELS) and module.split(".")[-1] in _CONV1D_LAYERS


def layers_of(blocks: BlockSource, block: Block) -> list[tuple[str, Part]]:
    """Return the linear layers whose weights make up a block."""
    out = []
    for part in block.parts:
        shape = blocks.source.tensors[part.key].shape
        rows = shape[-1] if part.transposed else shape[0] if shape else 0
        linear = part.key.endswith(".weight") and len(shape) == 2 and block.kind is not Kind.EMBEDDING
        if not linear or part.stop - part.start != rows:
            raise InputError(
                "LORA-KIND",
                "an adapter can change whole weights of linear layers, and nothing else",
                key=part.key,
                found=f"a change of {block.kind} {printable(block.name)}",
                fix="bake a checkpoint (--to safetensors), or learn with --partition blocks@weight on a "
                "model under Hugging Face's names",
            )
        out.append((part.key.removesuffix(".weight"), part))
    return out


def _layer(
    entry: BlockCoefficients, values: Tensor, deltas: Mapping[str, Delta], part: Part, rank: int | None
) -> _Truncated | None:
    """Return the update of some rows of a block; None if nothing changes them."""
    columns = entry.block.shape[1]
    bs, as_, dense = [], [], None
    for vector, row in zip(entry.vectors, values.float(), strict=True):
        if not bool(row.any()):
            continue
        delta = deltas[vector]
        if isinstance(delta, LowRank) and not _keeps_factors(entry):
            delta = _expanded(delta, rank, vector, f"{entry.partition.count} parts are no product of factors")
        if isinstance(delta, LowRank):
            for term in delta.terms:
                low, high = max(term.start, part.start), min(term.stop, part.stop)
                if low < high:
                    b = torch.zeros(part.stop - part.start, term.rank)
                    b[low - part.start : high - part.start] = (
                        term.b[low - term.start : high - term.start].float() * term.scale
                    )
                    scaled = _scaled(entry, row, part, b, term.a.float())
                    bs.append(scaled[0])
                    as_.append(scaled[1])
            continue
        if rank is None:
            raise _not_low_rank(vector, entry.block.name, "it changes all of the block")
        moved = (delta.dense().view(entry.block.shape) * _per_element(entry, row))[part.start : part.stop]
        dense = moved if dense is None else dense + moved
    if not bs and dense is None:
        return None
    b = torch.cat(bs, 1) if bs else torch.zeros(part.stop - part.start, 0)
    a = torch.cat(as_) if as_ else torch.zeros(0, columns)
    if rank is None:
        return _Truncated(LayerUpdate(b, a), 0.0, 0.0)
    return _truncated(b, a, dense, rank)


def _keeps_factors(entry: BlockCoefficients) -> bool:
    """Return True if a scaled product stays a product: scaled as a whole, by ranks, rows or columns."""
    partition = entry.partition
    if isinstance(partition, RowParts | ColumnParts):  # one part per element is a single row by columns
        return (partition.rows, partition.columns) == entry.block.matrix_shape
    return partition.scales_ranks


def _expanded(delta: LowRank, rank: int | None, vector: str, why: str) -> Delta:
    if rank is None:
        raise _not_low_rank(vector, "", why)
    return Dense(delta.dense())


def _scaled(entry: BlockCoefficients, row: Tensor, part: Part, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(entry.partition, RowParts):
        return b * row[part.start : part.stop, None], a
    if isinstance(entry.partition, ColumnParts):
        return b, a * row
    if isinstance(entry.partition, ComponentParts):
        return b * row[entry.partition.part_of_rank(a.shape[0])], a
    return b * row, a


def _per_element(entry: BlockCoefficients, row: Tensor) -> Tensor:
    partition = entry.partition
    if isinstance(partition, ElementPartition) and partition.count > 1:
        return row[partition.part_of()].view(entry.block.shape)
    return row


def _truncated(b: Tensor, a: Tensor, dense: Tensor | None, rank: int) -> _Truncated:
    """Return the best approximation of that rank, from QR factors alone if nothing is dense."""
    if dense is not None:
        u, s, v = torch.linalg.svd((dense + b @ a).double(), full_matrices=False)
    else:
        (qb, rb), (qa, ra) = torch.linalg.qr(b.double()), torch.linalg.qr(a.T.double())
        u, s, v = torch.linalg.svd(rb @ ra.T, full_matrices=False)
        u, v = qb @ u, v @ qa.T
    kept = max(1, min(rank, int((s > _NOTHING * s[0]).sum())))
    root = s[:kept].sqrt()
    update = LayerUpdate((u[:, :kept] * root).float(), (root[:, None] * v[:kept]).float())
    lost = float(s[kept:].square().sum()) if kept == rank else 0.0
    return _Truncated(update, lost, float(s.square().sum()))


def _not_low_rank(vector: str, block: str, why: str) -> InputError:
    return InputError(
        "LORA-KIND",
        f"vector '{printable(vector)}' is not low-rank here: {why}",
        key=block,
        fix="--rank 16 writes the best adapter of that rank, and says what it misses",
    )
