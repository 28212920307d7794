"""The gradient of an objective with respect to the base's weights: one pass over the data for any bank.

At zero coefficients dL/dlambda_ij is the inner product of cell ij with the gradient of block j. So one
gradient gives the scores of any number of vectors, all on a common scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import final

import torch
from torch import Tensor
from torch.func import functional_call

from aniso.data import Batch, Batches, cat_padded
from aniso.errors import NumericalError, UsageError, printable
from aniso.learn.heads import Classifier
from aniso.learn.objectives import DataTerm, Objective, TermInputs, logits_of
from aniso.models import Wrapped
from aniso.progress import ProgressCallback
from aniso.vectors import Bank, Block, Layout, TaskVector
from aniso.vectors.block import tied_names


@final
@dataclass(frozen=True)
class WeightGradient:
    """A gradient by the names of the model's tensors."""

    encoder: Wrapped
    tensors: Mapping[str, Tensor]

    def blocks(self, bank: Bank) -> dict[str, Tensor]:
        """Return the gradient of every block of a bank. Blocks that are whole tensors share their memory."""
        return self.over(bank.over(self.encoder.weight_source()).layout)

    def over(self, layout: Layout) -> dict[str, Tensor]:
        """Return the gradient of every block of the model's weights."""
        return {block.name: self._of(block) for block in layout.blocks}

    def _of(self, block: Block) -> Tensor:
        return block.gathered(self.tensors.__getitem__).cpu()


def weight_gradient(
    encoder: Wrapped,
    objective: Objective,
    *,
    batch_size: int = 64,
    seed: int = 0,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> WeightGradient:
    """Return the gradient of every term's mean over its split, each item seen once as in training."""
    if not objective.data_terms:
        raise UsageError(
            "OBJECTIVE", "the objective has no split to take a gradient over", fix="add CrossEntropy(split)"
        )
    device = next(encoder.parameters()).device
    leaves = _leaves(encoder)
    before = encoder.training
    encoder.eval()
    try:
        for weight, term in objective.data_terms:
            _require_fixed_targets(term)
            head = term.classifier(encoder)
            views = term.views(encoder)
            size = min(batch_size, term.split.default_batch_size)
            done = 0
            for batch in Batches(term.split, *views, size=size, seed=seed, workers=workers):
                targets = term.item_targets(encoder, batch.indices)
                inputs = _inputs(
                    lambda x: functional_call(encoder, leaves, (x.to(device),)), head, batch, targets
                )
                loss = weight * term.loss(inputs) * (len(batch) / len(term.split))
                _require_finite(loss, term, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                done += len(batch)
                if progress:
                    progress(f"gradient on {term.split.name}", done, len(term.split))
    finally:
        encoder.train(before)
    return WeightGradient(encoder, {name: _gradient(leaf) for name, leaf in leaves.items()})


def cell_gradients(vector: TaskVector, gradient: Mapping[str, Tensor]) -> dict[str, float]:
    """Return dL/dlambda of each of a vector's blocks at zero coefficients, one block in memory at a time."""
    found = {block.name: vector[block.name].along(gradient[block.name]) for block in vector.blocks}
    bad = [block for block, value in found.items() if not abs(value) < float("inf")]
    if bad:
        raise NumericalError(
            "LEARN-NONFINITE",
            f"the gradient of vector '{vector.name}' is {found[bad[0]]}",
            key=bad[0],
            fix="aniso bank check",
        )
    return found


def _inputs(
    model: Callable[[Tensor], Tensor], head: Classifier | None, batch: Batch, targets: Mapping[str, Tensor]
) -> TermInputs:
    features = model(cat_padded(batch.views))
    own = torch.split(features, [len(view) for view in batch.views])
    labels = None if batch.labels is None else batch.labels.to(features.device)
    marks = {name: values.to(features.device) for name, values in targets.items()}
    return TermInputs(tuple(own), logits_of(head, own), labels, marks)


def _leaves(encoder: Wrapped) -> dict[str, Tensor]:
    """Every tensor that belongs to a block, under all of its names; a tied tensor is one leaf."""
    places = encoder.layout.places
    own: dict[int, Tensor] = {}
    named = chain(
        encoder.named_parameters(remove_duplicate=False), encoder.named_buffers(remove_duplicate=False)
    )
    tied = tied_names(encoder.weight_source())
    return {
        name: own.setdefault(id(t), t.detach().requires_grad_())
        for name, t in named
        if tied.get(name, name) in places
    }


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _require_fixed_targets(term: DataTerm) -> None:
    if not term.fixed_targets:
        raise UsageError(
            "OBJECTIVE",
            f"'{printable(term.name)}' learns from its own predictions, so vectors have no fixed gradient",
            fix="select at random or by features, or by labelled images",
        )


def _require_finite(loss: Tensor, term: DataTerm, batch: Batch) -> None:
    if not bool(torch.isfinite(loss)):
        raise NumericalError(
            "LEARN-NONFINITE",
            f"the loss on {printable(term.name)} is {loss.item()}",
            found=[term.split.describe(i) for i in batch.indices[:20]],
            fix=f"look at these {term.split.item_kind}",
        )
