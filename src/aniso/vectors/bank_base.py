"""Checks that vectors share one base, and that a model is that base."""

from __future__ import annotations

from collections.abc import Iterable

from aniso.errors import InputError
from aniso.vectors.block import Layout
from aniso.vectors.block_source import BlockSource
from aniso.vectors.naming import PLAIN
from aniso.vectors.provenance import BaseInfo
from aniso.vectors.task_vector import TaskVector
from aniso.weights import WeightSource


def require_one_base(vectors: Iterable[TaskVector]) -> None:
    """Raise unless all vectors have the same blocks, the same base, and activations that agree."""
    first, *rest = vectors
    activations: dict[str, str] = {}
    for vector in rest:
        if vector.layout.signature != first.layout.signature:
            raise InputError(
                "BANK-LAYOUT",
                f"vectors '{first.name}' and '{vector.name}' have different blocks",
                fix="build the bank from one base",
            )
        if vector.has_base_of(first):
            continue
        for each in (first, vector):
            if each.base.activation:
                activations.setdefault(each.base.activation, each.name)
        if len(activations) > 1 or not vector.base.is_same_as(first.base):
            raise InputError(
                "BANK-BASE",
                f"vectors '{first.name}' and '{vector.name}' have different bases",
                expected=f"{first.base.label} {first.base.content[:16]}",
                found=f"{vector.base.label} {vector.base.content[:16]}",
                activations=" and ".join(f"{a} ({name})" for a, name in activations.items()),
                fix="build the bank from one base",
            )


def split_like(layout: Layout, source: WeightSource) -> BlockSource:
    """Return a model's weights in the blocks of a layout, whether it splits query, key and value or not."""
    scheme = PLAIN if layout.scheme == PLAIN else "auto"
    fused, split = (BlockSource(source, scheme=scheme, split=split) for split in (False, True))
    return split if split.layout.signature == layout.signature else fused


def require_base(model: BlockSource, base: BaseInfo, layout: Layout) -> None:
    """Raise unless the model is the base, by the content of its weights and its activation."""
    require_blocks(model, base, layout)
    found = model.identity()
    if found.content == base.content and not found.is_same_as(base):
        raise InputError(
            "CKPT-ACTIVATION",
            f"'{model.label}' has the weights of the bank's base, but another activation",
            expected=base.activation,
            found=found.activation,
            fix=f"--activation {base.activation}",
        )
    if not found.is_same_as(base):
        raise InputError(
            "BANK-BASE",
            f"'{model.label}' is not the bank's base",
            expected=f"{base.label} {base.content[:16]} ({base.activation})",
            found=f"{found.label} {found.content[:16]} ({found.activation})",
            fix=f"use the bank's base: {base.label}; from Python any_base=True, if you are sure",
        )


def require_blocks(model: BlockSource, base: BaseInfo, layout: Layout) -> None:
    """Raise unless the model has the blocks of the layout; ``base`` is named in the error."""
    if model.layout.signature == layout.signature:
        return
    ours = {b.name: b.shape for b in layout.blocks}
    theirs = {b.name: b.shape for b in model.layout.blocks}
    odd = next(n for n in (*ours, *theirs) if ours.get(n) != theirs.get(n))
    raise InputError(
        "BANK-LAYOUT",
        f"'{model.label}' has different blocks than the bank",
        key=odd,
        expected=f"{ours.get(odd, 'no such block')}; {len(ours)} blocks in all",
        found=f"{theirs.get(odd, 'no such block')}; {len(theirs)} blocks ({model.layout.scheme})",
        fix=f"use the bank's base, {base.label}, and --scheme {layout.scheme}",
    )
