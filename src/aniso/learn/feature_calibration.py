"""Calibration after a merge: closed-form corrections of every layer from a few items without labels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from aniso.compose import Composition
from aniso.data import Batches, Unlabelled, by_length
from aniso.errors import InputError, NumericalError, UsageError, printable
from aniso.learn._layerwise.layers import Layer, calibrated_layers, explicit_attention
from aniso.learn._layerwise.stream import LayerStream, TaskItems
from aniso.learn._layerwise.trace import Group, Trace, trace
from aniso.learn.calibration_rules import Affine, CalibrationRule, FeatCal, Moments, System
from aniso.learn.teacher import Teacher
from aniso.learn.unwrap import encoder_of, require_items
from aniso.progress import ProgressCallback, progress_or_default
from aniso.vectors import BlockSource, KeyEdits, TaskVector
from aniso.vectors.difference import difference_between
from aniso.weights import TensorMap, WeightSource

ITEMS = 64
"""Default number of items of every task."""
_BATCH = 32


@final
@dataclass(frozen=True)
class CalibratedModel:
    """Result of ``calibrate_features``: the calibrated model as a task vector, and what was done."""

    vector: TaskVector
    """The calibrated model minus the base: at coefficient 1 it gives the model."""
    layers: tuple[str, ...]
    """Names of the layers that were calibrated, in the order of the forward pass."""
    items: Mapping[str, int]
    """Number of items by task."""
    notes: tuple[str, ...]


@torch.no_grad()
def calibrate_features(
    model: nn.Module,
    teachers: Mapping[str, Teacher],
    splits: Mapping[str, Unlabelled],
    rule: CalibrationRule | None = None,
    *,
    items: int = ITEMS,
    seed: int = 0,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> CalibratedModel:
    """Calibrate a merged model by its teachers on items without labels.

    Every linear layer and layer norm gets new weights in closed form, lower layers first, so that the inputs
    of a layer are those of the calibrated model::

        merged = with_vector(encoder, Bank({"tsv": merge.tsv(bank)}))
        teachers = {task.name: Teacher.of(encoder, bank, task.name) for task in tasks}
        splits = {task.name: task.train.unlabelled() for task in tasks}
        vector = calibrate_features(merged, teachers, splits, FeatCal()).vector

    Args:
        model: a composition, or an encoder with merged weights. It is not changed.
        teachers: the fine-tuned models by task.
        splits: the items of every task, with the same names.
        rule: ``FeatCal``, ``RegMean`` or ``RegMeanPlusPlus``; the default is ``FeatCal()``.
        items: number of items of every task, drawn by ``seed``; all if there are fewer.

    Returns: the calibrated model as one task vector over the base.

    Raises: NumericalError if an input of a layer is NaN or infinite.
    """
    _require_tasks(teachers, splits, items)
    made = _Calibration(model, teachers, rule or FeatCal(), progress_or_default(progress))
    drawn = {name: calibration_items(split, items, seed) for name, split in splits.items()}
    for name, split in drawn.items():
        require_items(made.encoder, split)
        made.add_task(name, split, workers)
    with explicit_attention(made.encoder):
        layers = made.run()
    counts = {name: len(split) for name, split in drawn.items()}
    few = [f"{name}: {count} of {items} items" for name, count in counts.items() if count < items]
    notes = (*(f"calibration has fewer items of {printable(text)}" for text in few), *made.notes)
    return CalibratedModel(made.vector(counts), layers, counts, notes)


@final
class _Calibration:
    """The student's weights, and the base and the teachers that they are calibrated by."""

    def __init__(
        self,
        model: nn.Module,
        teachers: Mapping[str, Teacher],
        rule: CalibrationRule,
        progress: ProgressCallback,
    ) -> None:
        self.rule = rule
        self.notes: tuple[str, ...] = ()
        composed = {name: teacher.compose() for name, teacher in teachers.items()}
        first = next(iter(composed.values()))
        self.encoder = encoder_of(first).eval()
        self.source = self.encoder.weight_source()
        self.layout = first.layout
        self._progress = progress
        self._tasks: list[TaskItems] = []
        self._baked = {name: one.bake() for name, one in composed.items()}
        self._moved = {name: _moved_keys(one) for name, one in composed.items()}
        self._keys = [key for key in self.layout.places if any(key in own for own in self._moved.values())]
        merged = model.bake() if isinstance(model, Composition) else encoder_of(model).weight_source()
        self._require_same(merged)
        self._label = merged.label
        self._merged_by = _formula(model)
        self.student = {key: self._to_device(merged.read(key)) for key in self.layout.places}

    def add_task(self, name: str, split: Unlabelled, workers: int) -> None:
        """Add the items of a task."""
        view = self.encoder.transforms.eval
        order = by_length(split, view)

        def batches() -> Iterator[Tensor]:
            for batch in Batches(split, view, size=_BATCH, workers=workers, order=order):
                yield batch.inputs

        self._tasks.append(TaskItems(name, self._teacher(name), batches))

    def run(self) -> tuple[str, ...]:
        """Calibrate all layers; return their names."""
        if not self.rule.uses_start:
            for key in self.student:
                self.student[key] = self._average(key)
        found = self._traced()
        stream = LayerStream(
            self.encoder,
            found,
            list(self.layout.places),
            self.student,
            self._tasks,
            uses_student=self.rule.uses_student,
            uses_teachers=self.rule.uses_teachers,
        )
        done: list[str] = []
        for number, (stage, group) in enumerate(found.groups):
            new = self._calibrated(stream, stage, group)
            for layer, affine in zip(group, new, strict=True):
                if affine is not None:
                    self._replace(layer, affine)
                    done.append(layer.name)
            self._progress("calibrating layers", number + 1, len(found.groups))
        self._note_rest({layer.name: layer for _, group in found.groups for layer in group}, done)
        return tuple(done)

    def _traced(self) -> Trace:
        """The order of the layers that any teacher has changed."""
        moved = set(self._keys)
        layers = {
            name: layer
            for name, layer in calibrated_layers(self.encoder).items()
            if moved & set(layer.keys) and set(layer.keys) <= set(self.student)
        }
        inputs = next(iter(self._tasks[0].batches())).to(self._device)

        def run() -> object:
            return torch.func.functional_call(self.encoder, self.student, (inputs,))

        return trace(self.encoder, layers, run)

    def _calibrated(self, stream: LayerStream, stage: int, group: Group) -> list[Affine | None]:
        """Return new weights and biases of a group of layers; None for those that stay as they are."""
        is_norm = group[0].is_norm
        system, norms = System(), list[tuple[Moments, Affine]]()
        if is_norm and type(self.rule).norm is CalibrationRule.norm:
            return [None]
        for task in self._tasks:
            moments = Moments(by_dimension=is_norm)
            for rows in stream.inputs(stage, group, task.name):
                moments.add(*((rows[0],) if is_norm else self.rule.inputs(rows)))
            if not moments.is_finite:
                raise _not_finite(group[0].name, task.name)
            own = [self._affine(layer, self._baked[task.name]) for layer in group]
            if is_norm:
                norms.append((moments, own[0]))
                continue
            gram, cross = self.rule.moment(moments.gram), self.rule.moment(moments.cross)
            system.add(self.rule.task_weight(gram), gram, cross, moments, own)
        start = [self._affine(layer, self.student) for layer in group]
        base = [self._affine(layer, self.source) for layer in group]
        if is_norm:
            return [self.rule.norm(norms, start[0], base[0])]
        return [*self.rule.linear(system, start, base)]

    def _affine(self, layer: Layer, source: WeightSource | Mapping[str, Tensor]) -> Affine:
        """Weight and bias of a layer as float64, the weight as a matrix or, of a layer norm, a vector."""

        def read(key: str) -> Tensor:
            found = source.read(key) if isinstance(source, WeightSource) else source[key]
            device = "cpu" if self._device.type == "mps" else self._device
            return found.to(device).double()

        weight = read(layer.weight)
        bias = None if layer.bias is None else read(layer.bias)
        return Affine(weight if layer.is_norm else weight.flatten(1), bias)

    def _replace(self, layer: Layer, new: Affine) -> None:
        for key, value in zip(layer.keys, new, strict=False):
            assert value is not None
            old = self.student[key]
            self.student[key] = value.view(old.shape).to(old.dtype).to(old.device)

    def _average(self, key: str) -> Tensor:
        """The mean of a tensor over all teachers."""
        total = sum((self._baked[task.name].read(key).double() for task in self._tasks), torch.zeros(()))
        return self._to_device((total / len(self._tasks)).to(self.student[key].dtype))

    def _teacher(self, name: str) -> Callable[[Collection[str]], dict[str, Tensor]]:
        baked, moved = self._baked[name], self._moved[name]
        return lambda keys: {key: self._to_device(baked.read(key)) for key in keys if key in moved}

    @property
    def _device(self) -> torch.device:
        return next(iter(self.encoder.parameters())).device

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)

    def _note_rest(self, layers: Mapping[str, Layer], done: Iterable[str]) -> None:
        known = {key for name in done for key in layers[name].keys}
        rest = [key for key in self._keys if key not in known]
        if rest:
            what = "kept as merged" if self.rule.uses_start else "averaged"
            names = ", ".join(rest[:4]) + (", …" if len(rest) > 4 else "")
            self.notes += (f"calibration: {len(rest)} of {len(self._keys)} tensors are {what}: {names}",)

    def _require_same(self, merged: WeightSource) -> None:
        """Raise unless a merged model has the tensors of the teachers' base."""
        missing = [
            key
            for key in self.layout.places
            if key not in merged.tensors or merged.tensors[key].shape != self.source.tensors[key].shape
        ]
        if missing:
            raise InputError(
                "BANK-BASE",
                "the model to calibrate is not over the base of its teachers",
                key=missing[0],
                fix="make teachers with the model that the bank belongs to: Teacher.of(encoder, bank, name)",
            )

    def vector(self, counts: Mapping[str, int]) -> TaskVector:
        """Return the difference of the student to the base."""
        tied = {**self.source.aliases}
        tensors = {
            name: self.student.get(tied.get(name, name), tensor).cpu()
            for name, tensor in self.encoder.state_dict().items()
        }
        tuned = TensorMap(tensors, self._label, config=self.encoder.model_config)
        blocks = BlockSource.of(self.source)
        found = difference_between(blocks, tuned, KeyEdits(), name=self.rule.name, allow_distant=True)
        words = ", ".join(f"{count} items of {name}" for name, count in counts.items())
        made = f"{self.rule} of {self._merged_by}" if self.rule.uses_start else str(self.rule)
        formula = f"{made}; {words}, without labels"
        provenance = replace(found.provenance, source=made, format="arithmetic", formula=formula)
        # whether the norms are those of fine-tuning is no question here
        calibrated = replace(found, provenance=provenance, check_norms=lambda norms: [])
        return TaskVector.of_difference(calibrated).checked()


def _moved_keys(composition: Composition) -> set[str]:
    """Names of the tensors that a teacher's vectors change."""
    blocks = {block.name for name in composition.bank for block in composition.bank[name].blocks}
    places = composition.layout.places
    return {key for key, found in places.items() if any(place.block.name in blocks for place in found)}


def _formula(model: nn.Module) -> str:
    if not isinstance(model, Composition):
        return "given weights"
    coefficients, bank = model.coefficients, model.bank
    known = bank[bank.names[0]].provenance.formula if len(bank) == 1 else ""
    if known and bool((coefficients.values == 1).all()):
        return known
    return f"composition {coefficients.content_hash[:12]} of {', '.join(bank.names)}"


def calibration_items(split: Unlabelled, items: int = ITEMS, seed: int = 0) -> Unlabelled:
    """Return the items of a split that calibration uses: so many, drawn by seed and item, or all."""
    if len(split) <= items:
        return split
    return split.carve("calibration", seed, share=items / len(split), what=f"{items} items, seed {seed}")[0]


def _require_tasks(teachers: Mapping[str, Teacher], splits: Mapping[str, Unlabelled], items: int) -> None:
    if items < 1:
        raise UsageError(
            "USAGE", f"invalid number of items: {items}", expected="1 or more", fix="--calibrate-items 64"
        )
    if not splits or set(teachers) != set(splits):
        raise UsageError(
            "USAGE",
            "calibration needs one teacher and one split for every task",
            found=", ".join(map(printable, teachers)) or "no teacher",
            expected=", ".join(map(printable, splits)) or "at least one split",
            fix="name teachers and splits alike",
        )
    for name, split in splits.items():
        if not isinstance(split, Unlabelled):
            raise UsageError(
                "USAGE",
                f"calibration learns from no label, and the items of {printable(name)} have some",
                found=type(split).__name__,
                expected="Unlabelled",
                fix="split.unlabelled()",
            )
        if not len(split):
            raise InputError(
                "DATA-MISSING", f"{printable(split.name)} is empty", fix="use a split with items"
            )


def _not_finite(layer: str, task: str) -> NumericalError:
    return NumericalError(
        "LEARN-NONFINITE",
        f"an input of layer '{printable(layer)}' is NaN or infinite on the items of {printable(task)}",
        likely="the merged model, or the teacher of this task, has weights that are too large",
        fix="calibrate another merge, or one at a smaller scale: --scale 0.5",
    )
