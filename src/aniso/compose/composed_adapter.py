"""A composition of LoRA adapters as one: sum of coefficient * B A, written as PEFT writes and reads it.

Factors of all vectors side by side are exact, negative coefficients included: they go to one factor, not to
both. Fewer ranks than that are the best ones by singular values, and what they miss is said.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from aniso.compose.card import factors_card, model_card
from aniso.compose.coefficients import Coefficients
from aniso.compose.division import Columns, Rows, Undivided
from aniso.compose.slots import Slot
from aniso.errors import InputError, UsageError, printable
from aniso.vectors import Bank, Block, BlockSource, Delta, Dense, Kind, LowRank, Part
from aniso.weights import Ref, save_safetensors
from aniso.weights.atomic import atomic_directory, write_text
from aniso.weights.files import Progress

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_NOTHING = 1e-7  # of the largest singular value: what float32 cannot tell from zero


@final
@dataclass(frozen=True)
class Update:
    """``b @ a``, outputs by inputs."""

    b: Tensor
    a: Tensor

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def laid_out(self, blocks: BlockSource, module: str, part: Part) -> Update:
        """Outputs by inputs, whichever way the block and the layer have them."""
        return Update(self.a.T, self.b.T) if inputs_first(blocks, module) != part.transposed else self


@final
@dataclass(frozen=True)
class ComposedAdapter:
    """One update for each layer that coefficients move."""

    updates: Mapping[str, Update]
    """By the name of the layer."""
    error: float
    """What was lost by fewer ranks, as a share of the whole change's norm; 0 if nothing was."""
    fan_in_fan_out: bool
    coefficients: Coefficients | None
    """Of whole updates; those of factors fit no bank on disk."""
    bank: Bank

    @property
    def ranks(self) -> dict[str, int]:
        return {module: update.rank for module, update in self.updates.items()}

    def config(self) -> dict[str, Any]:
        """Scales are 1: PEFT multiplies by alpha / rank."""
        ranks = self.ranks
        most = max(ranks.values())
        other = {_pattern(module, ranks): rank for module, rank in ranks.items() if rank != most}
        return {
            "peft_type": "LORA",
            "base_model_name_or_path": self.bank.base.label,
            "task_type": None,
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

    def save(self, directory: str | Path, *, command: str = "", overwrite: bool = False) -> None:
        """A directory that ``peft`` loads, with a card and the coefficients beside it."""
        tensors = {}
        for module, update in self.updates.items():
            tensors[f"base_model.model.{module}.lora_A.weight"] = update.a.contiguous()
            tensors[f"base_model.model.{module}.lora_B.weight"] = update.b.contiguous()
        lost = f" Fewer ranks than the sum has lose {self.error:.2%} of it." if self.error else ""
        said = f"Here they are written as a LoRA adapter for PEFT.{lost}"
        with atomic_directory(Path(directory), overwrite=overwrite) as place:
            save_safetensors(place / _WEIGHTS, tensors, {"format": "pt"})
            write_text(place / _CONFIG, json.dumps(self.config(), indent=2, sort_keys=True) + "\n")
            if self.coefficients is None:
                write_text(place / "README.md", factors_card(self.bank, command=command))
                return
            write_text(
                place / "README.md", model_card(self.coefficients, self.bank, command=command, more=[said])
            )
            self.coefficients.save(place / "coefficients.safetensors")


def _pattern(module: str, modules: Iterable[str]) -> str:
    """PEFT takes patterns for the ends of names, unless they say where a name begins."""
    is_end = any(other.endswith(f".{module}") for other in modules)
    return f"^{re.escape(module)}" if is_end else module


def composed_adapter(
    base: Ref | BlockSource,
    bank: Bank,
    coefficients: Coefficients,
    *,
    rank: int | None = None,
    any_base: bool = False,
    any_bank: bool = False,
    progress: Progress | None = None,
) -> ComposedAdapter:
    """The composition as an adapter of its base, block by block.

    Without a ``rank`` all vectors have to be low-rank, and nothing is lost. With one, any vectors will do
    that change the weights of linear layers alone. Which layers keep inputs first, as GPT-2's do, is known
    from the base's configuration.
    """
    if rank is not None and rank < 1:
        raise UsageError(
            "USAGE", f"an adapter cannot have rank {rank}", expected="1 or more", fix="--rank 16"
        )
    coefficients.require_standard()
    chosen = coefficients.chosen(bank)
    own = coefficients.for_bank(chosen, any_bank=any_bank)
    blocks = chosen.over(base, any_base=any_base)
    updates: dict[str, Update] = {}
    lost = whole = 0.0
    for slot, values in zip(own.slots.blocks, own.slots.divided(own.values), strict=True):
        if bool(values.any()):
            deltas = chosen.only(*slot.vectors).read_block(slot.block.name, exact=False)
            for module, part in layers_of(blocks, blocks.layout.by_name[slot.block.name]):
                made, gone, size = _layer(slot, values, deltas, part, rank)
                lost, whole = lost + gone, whole + size
                if made is not None:
                    updates[module] = made.laid_out(blocks, module, part)
        if progress:
            progress(4 * slot.block.numel)
    if not updates:
        raise InputError(
            "COEF-VALUES",
            "all coefficients are zero: there is nothing to write as an adapter",
            fix="use the base itself",
        )
    turned = any(inputs_first(blocks, module) for module in updates)
    return ComposedAdapter(updates, math.sqrt(lost / whole) if whole else 0.0, turned, own, chosen)


_CONV1D_MODELS = ("gpt2", "openaigpt", "imagegpt", "decisiontransformer", "clvp")
"""How the names of architectures begin that have layers of transformers' Conv1D."""
_CONV1D_LAYERS = ("c_attn", "q_attn", "c_proj", "c_fc")


def inputs_first(blocks: BlockSource, module: str) -> bool:
    """Whether a layer keeps inputs before outputs, as GPT-2's do; no file says it, only the architecture."""
    architecture = (blocks.source.info.config.architecture or "").lower()
    return architecture.startswith(_CONV1D_MODELS) and module.split(".")[-1] in _CONV1D_LAYERS


def layers_of(blocks: BlockSource, block: Block) -> list[tuple[str, Part]]:
    """The linear layers whose weights a block is made of."""
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
    slot: Slot, values: Tensor, deltas: Mapping[str, Delta], part: Part, rank: int | None
) -> tuple[Update | None, float, float]:
    """The update of some rows of a block; and the squares of what it misses, and of all there is."""
    columns = slot.block.shape[1]
    bs, as_, dense = [], [], None
    for vector, row in zip(slot.vectors, values.float(), strict=True):
        if not bool(row.any()):
            continue
        delta = deltas[vector]
        if isinstance(delta, LowRank) and not _keeps_factors(slot):
            delta = _expanded(delta, rank, vector, f"{slot.division.count} parts are no product of factors")
        if isinstance(delta, LowRank):
            for term in delta.terms:
                low, high = max(term.start, part.start), min(term.stop, part.stop)
                if low < high:
                    b = torch.zeros(part.stop - part.start, term.rank)
                    b[low - part.start : high - part.start] = (
                        term.b[low - term.start : high - term.start].float() * term.scale
                    )
                    scaled = _scaled(slot, row, part, b, term.a.float())
                    bs.append(scaled[0])
                    as_.append(scaled[1])
            continue
        if rank is None:
            raise _not_low_rank(vector, slot.block.name, "it changes all of the block")
        moved = (delta.dense().view(slot.block.shape) * _per_element(slot, row))[part.start : part.stop]
        dense = moved if dense is None else dense + moved
    if not bs and dense is None:
        return None, 0.0, 0.0
    b = torch.cat(bs, 1) if bs else torch.zeros(part.stop - part.start, 0)
    a = torch.cat(as_) if as_ else torch.zeros(0, columns)
    if rank is None:
        return Update(b, a), 0.0, 0.0
    return _compressed(b, a, dense, rank)


def _keeps_factors(slot: Slot) -> bool:
    """Whether scaled parts of a product are a product: all of it, its rows, or its columns."""
    division = slot.division
    if isinstance(division, Rows | Columns):  # parts of one element each are columns of one row
        return (division.rows, division.columns) == slot.block.matrix_shape
    return isinstance(division, Undivided)


def _expanded(delta: LowRank, rank: int | None, vector: str, why: str) -> Delta:
    if rank is None:
        raise _not_low_rank(vector, "", why)
    return Dense(delta.dense())


def _scaled(slot: Slot, row: Tensor, part: Part, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(slot.division, Rows):
        return b * row[part.start : part.stop, None], a
    if isinstance(slot.division, Columns):
        return b, a * row
    return b * row, a


def _per_element(slot: Slot, row: Tensor) -> Tensor:
    if isinstance(slot.division, Undivided):
        return row
    return row[slot.division.part_of()].view(slot.block.shape)


def _compressed(b: Tensor, a: Tensor, dense: Tensor | None, rank: int) -> tuple[Update, float, float]:
    """The best approximation of so many ranks; through small matrices where factors are all there is."""
    if dense is not None:
        u, s, v = torch.linalg.svd((dense + b @ a).double(), full_matrices=False)
    else:
        (qb, rb), (qa, ra) = torch.linalg.qr(b.double()), torch.linalg.qr(a.T.double())
        u, s, v = torch.linalg.svd(rb @ ra.T, full_matrices=False)
        u, v = qb @ u, v @ qa.T
    kept = max(1, min(rank, int((s > _NOTHING * s[0]).sum())))
    root = s[:kept].sqrt()
    made = Update((u[:, :kept] * root).float(), (root[:, None] * v[:kept]).float())
    return made, float(s[kept:].square().sum()) if kept == rank else 0.0, float(s.square().sum())


def _not_low_rank(vector: str, block: str, why: str) -> InputError:
    return InputError(
        "LORA-KIND",
        f"vector '{printable(vector)}' is not low-rank here: {why}",
        key=block,
        fix="--rank 16 writes the best adapter of that rank, and says what it misses",
    )
