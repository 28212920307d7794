"""mergekit's YAML: the weights of its ``models:`` as coefficients, and coefficients as such a file.

A weight is a number, a gradient (a list, interpolated linearly over the layers) or a list of filters, of
which the first that is contained in the tensor's name counts. ``task_arithmetic`` adds weight times (model -
base); ``linear`` averages models, which is the same with weights that are divided by their sum. What else
mergekit does changes tensors in ways that coefficients cannot express, and is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, final

import torch
from pydantic import Field

from aniso.compose import Coefficients, Partition
from aniso.errors import InputError, UsageError, printable
from aniso.experiments.options import Options
from aniso.experiments.strict_yaml import Document, as_yaml, read_yaml, refusal, validated
from aniso.json_value import JsonObject, JsonValue
from aniso.learn.starts import interpolated
from aniso.vectors import Bank, Block, Kind

METHODS = ("linear", "task_arithmetic")
_REFUSED = {
    "slices": "it assembles layers of several models, which coefficients cannot express",
    "modules": "it merges parts of a model separately",
    "tokenizer": "aniso keeps the base's tokenizer",
    "tokenizer_source": "aniso keeps the base's tokenizer",
    "chat_template": "aniso keeps the base's chat template",
}
_NO_EFFECT = ("dtype", "out_dtype")
_TOLERANCE = 1e-6
_FIRST_WORDS = ("conv1", "ln_pre", "pre_layernorm", "pre_layrnorm", "patch_embed", "wte", "wpe")
"""Names of blocks that come before the first layer, beside embeddings."""


class Conditional(Options):
    """A value for tensors whose name contains a text; all, if there is none."""

    value: float | list[float]
    filter: str | None = None

    def applies_to(self, name: str) -> bool:
        """True if the filter is contained in the name of a tensor."""
        return self.filter is None or self.filter == "*" or self.filter in name


Weight = float | list[float] | Conditional | list[Conditional]
"""A number, a gradient over the layers, or values with filters."""


class Parameters(Options):
    """Parameters of a model, or of all."""

    weight: Weight | None = None
    normalize: bool | None = None
    scale: Annotated[float | None, Field(alias="lambda")] = None


class MergedModel(Options):
    """One of the models that are merged."""

    model: str
    parameters: Parameters = Field(default_factory=Parameters)


class MergeConfig(Options):
    """The part of a mergekit configuration that coefficients can express."""

    merge_method: Literal["linear", "task_arithmetic"]
    models: list[MergedModel] = Field(min_length=1)
    base_model: str | None = None
    parameters: Parameters = Field(default_factory=Parameters)


@final
@dataclass(frozen=True)
class MergekitImport:
    """Coefficients from a mergekit file, and what was left out of it."""

    coefficients: Coefficients
    notes: tuple[str, ...]


def read_mergekit(path: Path) -> tuple[MergeConfig, tuple[str, ...]]:
    """Read a configuration; keys that coefficients cannot express are errors with their line."""
    document = read_yaml(path)
    for key, reason in _REFUSED.items():
        if document.data.get(key) is not None and (key, document.data[key]) != ("tokenizer_source", "base"):
            raise refusal(
                document.label,
                document.lines.get((key,)),
                f"'{key}' is not supported: {reason}",
                key=key,
                expected="models, with merge_method linear or task_arithmetic",
                fix=f"remove '{key}', or merge with mergekit itself",
            )
    method = document.data.get("merge_method")
    if isinstance(method, str) and method not in METHODS:
        raise refusal(
            document.label,
            document.lines.get(("merge_method",)),
            f"merge_method '{printable(method)}' changes the vectors themselves, not only their weights",
            key="merge_method",
            expected=" or ".join(METHODS),
            fix="merge with mergekit itself, or use task_arithmetic",
        )
    left_out = {key: document.data[key] for key in (*_NO_EFFECT, "tokenizer_source") if key in document.data}
    kept = {key: value for key, value in document.data.items() if key not in {*left_out, *_REFUSED}}
    notes = [f"{key} {printable(value)}: no effect on coefficients" for key, value in left_out.items()]
    return validated(MergeConfig, Document(document.label, kept, document.lines)), tuple(notes)


def import_mergekit(path: Path, bank: Bank, names: Mapping[str, str] | None = None) -> MergekitImport:
    """Return the coefficients that a mergekit file describes, for the vectors of a bank.

    ``names`` has the vector of a model by mergekit's name for it; by default a vector has the name of the
    model, or of the last part of its path. Filters are matched with the names of the bank's blocks.
    """
    config, notes = read_mergekit(path)
    vectors = {
        model.model: _vector(model.model, bank, names or {})
        for model in config.models
        if model.model != config.base_model
    }
    if not vectors:
        raise InputError("BANK-NAME", f"'{printable(path)}' names no model but the base", fix="add a model")
    twice = [name for name in vectors.values() if [*vectors.values()].count(name) > 1]
    if twice:
        raise InputError(
            "BANK-NAME", f"two models are vector '{printable(twice[0])}'", fix="--vector VECTOR=MODEL"
        )
    chosen = bank.only(*vectors.values())
    depths = _depths(chosen.layout.blocks)
    rows = {block.name: _weights(config, block, depths[block.name]) for block in chosen.layout.blocks}
    shared = len({tuple(row.items()) for row in rows.values()}) == 1
    zeros = Coefficients.zeros(chosen, Partition.whole() if shared else Partition.blocks())
    by_vector = {vector: model for model, vector in vectors.items()}
    anywhere = next(iter(rows))
    values = [rows[anywhere if shared else block][by_vector[vector]] for vector, block, _, _ in zeros.items()]
    made = Coefficients(zeros.index, torch.tensor(values, dtype=torch.float32), zeros.provenance)
    return MergekitImport(made, notes)


def export_mergekit(coefficients: Coefficients, models: Mapping[str, str], base: str | None = None) -> str:
    """Return a mergekit configuration, ``task_arithmetic``, that gives the same model.

    ``models`` has the model of every vector, as mergekit is to find it: a directory or a hub id; a vector
    that is not named is written under its own name. Raises if the coefficients cannot be expressed.
    """
    coefficients.require_standard()
    if coefficients.partition.rule not in ("whole", "blocks") or coefficients.matrix().isnan().any():
        raise UsageError(
            "PARTITION",
            f"coefficients of partition '{coefficients.partition}' cannot be written for mergekit",
            expected="one coefficient per vector, or per vector and block, with every vector in every block",
            fix="aniso bake writes the composed model itself",
        )
    blocks = [entry.block for entry in coefficients.index.blocks]
    rows: list[JsonValue] = []
    for vector, row in zip(coefficients.vectors, coefficients.matrix().tolist(), strict=True):
        own = dict(zip((block.name for block in blocks), row, strict=True))
        weight = _expressed(own, blocks)
        rows.append({"model": models.get(vector, vector), "parameters": {"weight": weight}})
    made: JsonObject = {
        "merge_method": "task_arithmetic",
        "base_model": base or coefficients.provenance.base.label,
        "models": rows,
    }
    return as_yaml(made)


# weights of one block


def _weights(config: MergeConfig, block: Block, t: float) -> dict[str, float]:
    """The coefficient of every model but the base in one block at relative depth ``t``."""
    found = {model.model: _required(config, model, block, t) for model in config.models}
    linear = config.merge_method == "linear"
    counted = [w for model, w in found.items() if linear or model != config.base_model]
    scale = (1.0 if config.parameters.scale is None else config.parameters.scale) / _divisor(
        config, sum(counted), block
    )
    return {model: weight * scale for model, weight in found.items() if model != config.base_model}


def _required(config: MergeConfig, model: MergedModel, block: Block, t: float) -> float:
    """The weight of a model: its own, or that of all; the base needs none."""
    for parameters in (model.parameters, config.parameters):
        weight = _value(parameters.weight, block.name, t)
        if weight is not None:
            return weight
    if model.model == config.base_model:
        return 0.0
    raise InputError(
        "MERGEKIT",
        f"model '{printable(model.model)}' has no weight for block '{printable(block.name)}'",
        fix="add a last value without a filter",
    )


def _divisor(config: MergeConfig, total: float, block: Block) -> float:
    """What weights are divided by: their sum, if the configuration or its method normalises."""
    linear, normalise = config.merge_method == "linear", config.parameters.normalize
    if linear if normalise is None else normalise:
        if abs(total) >= 1e-8:
            return total
        if not linear:
            return 1.0  # as mergekit has it
    elif not linear or abs(total - 1) <= _TOLERANCE:
        return 1.0
    raise InputError(
        "MERGEKIT",
        f"weights of a linear merge sum to {total:g}, which scales the base itself",
        key=printable(block.name),
        expected="a sum of 1, or normalize: true and a sum that is not 0",
        fix="merge_method: task_arithmetic, or change the weights",
    )


def _value(weight: Weight | None, name: str, t: float) -> float | None:
    """The value of a weight for a tensor at relative depth ``t``; None if no filter applies."""
    if weight is None or isinstance(weight, float | int):
        return None if weight is None else float(weight)
    conditions = [weight] if isinstance(weight, Conditional) else weight
    numbers = [one for one in conditions if isinstance(one, float | int)]
    if numbers:
        return interpolated(numbers, t)
    for one in conditions:
        if isinstance(one, Conditional) and one.applies_to(name):
            return _value(one.value, name, t)
    return None


def _depths(blocks: Sequence[Block]) -> dict[str, float]:
    """The place t of every block: layer / (layers - 1); 0 before the first layer, 1 after the last."""
    deepest = max((block.depth for block in blocks if block.depth is not None), default=0)
    out = {}
    for block in blocks:
        if block.depth is None:
            out[block.name] = 0.0 if _is_first(block) else 1.0
        else:
            out[block.name] = block.depth / deepest if deepest else 1.0
    return out


def _is_first(block: Block) -> bool:
    return block.kind is Kind.EMBEDDING or any(word in block.name for word in _FIRST_WORDS)


def _vector(model: str, bank: Bank, names: Mapping[str, str]) -> str:
    """The vector that a model is: as named, or by the last part of its path; of A+B it is the adapter B."""
    reference = model.rpartition("+")[2] or model
    candidates = [names.get(model, ""), model, PurePosixPath(reference).name, PurePosixPath(reference).stem]
    found = next((name for name in candidates if name in bank), None)
    if found is None:
        raise InputError(
            "BANK-NAME",
            f"the bank has no vector for model '{printable(model)}'",
            found=", ".join(bank.names),
            fix=f"--vector VECTOR={printable(model)}",
        )
    return found


# writing


def _expressed(own: Mapping[str, float], blocks: Sequence[Block]) -> JsonValue:
    """The simplest weight that gives these coefficients: a number, a gradient, or filters with either."""
    for weight in (_constant(own), _gradient(own, blocks), _filtered(own, blocks)):
        if weight is not None and _gives(weight, own, blocks):
            return _plain(weight)
    raise UsageError(
        "MERGEKIT",
        "these coefficients cannot be written for mergekit: its filters cannot tell the blocks apart",
        fix="aniso bake writes the composed model itself",
    )


def _constant(own: Mapping[str, float]) -> Weight | None:
    return next(iter(own.values()))


def _gradient(own: Mapping[str, float], blocks: Sequence[Block]) -> list[float] | None:
    """One value per layer, if every layer has one."""
    layers: dict[int, float] = {}
    for block in blocks:
        if block.depth is not None:
            layers.setdefault(block.depth, own[block.name])
    whole = sorted(layers) == list(range(len(layers)))
    return [layers[i] for i in range(len(layers))] if len(layers) > 1 and whole else None


def _filtered(own: Mapping[str, float], blocks: Sequence[Block]) -> list[Conditional] | None:
    """A filter for every kind of block in a layer, with its gradient, and one for every other block."""
    groups: dict[str, list[Block]] = {}
    for block in blocks:
        mark = "" if block.depth is None else f".{block.depth}."
        role = block.name if not mark else f".{block.name.partition(mark)[2]}"
        groups.setdefault(role, []).append(block)
    out = []
    for role in sorted(groups, key=len, reverse=True):  # a shorter text may be part of a longer one
        members = groups[role]
        values = [own[block.name] for block in members]
        gradient = _gradient(own, members)
        out.append(Conditional(filter=role, value=values[0] if len({*values}) == 1 else gradient or values))
    return out


def _gives(weight: Weight, own: Mapping[str, float], blocks: Sequence[Block]) -> bool:
    depths = _depths(blocks)
    found = {block.name: _value(weight, block.name, depths[block.name]) for block in blocks}
    return all(v is not None and abs(v - own[name]) <= _TOLERANCE for name, v in found.items())


def _plain(weight: Weight) -> JsonValue:
    if isinstance(weight, list):
        return [_plain(one) for one in weight]
    if isinstance(weight, Conditional):
        return {"filter": weight.filter, "value": _plain(weight.value)}
    return float(f"{weight:.9g}")
