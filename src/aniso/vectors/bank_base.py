"""Whether a model is the one that vectors were made over."""

from __future__ import annotations

from aniso.errors import InputError
from aniso.vectors.block import Layout
from aniso.vectors.block_source import BlockSource
from aniso.vectors.naming import PLAIN
from aniso.vectors.provenance import BaseInfo
from aniso.weights import WeightSource


def divided_as(layout: Layout, source: WeightSource) -> BlockSource:
    """A model's blocks as a layout has them, where query, key and value may be blocks of their own."""
    scheme = PLAIN if layout.scheme == PLAIN else "auto"
    fused, split = (BlockSource(source, scheme=scheme, split=split) for split in (False, True))
    return split if split.layout.signature == layout.signature else fused


def require_base(model: BlockSource, base: BaseInfo, layout: Layout) -> None:
    """The very model, by its content and its activation."""
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
            expected=f"{base.label} {base.fingerprint[:16]} ({base.activation})",
            found=f"{found.label} {found.fingerprint[:16]} ({found.activation})",
            fix=f"use the bank's base: {base.label}; from Python any_base=True, if you are sure",
        )


def require_blocks(model: BlockSource, base: BaseInfo, layout: Layout) -> None:
    """A model of the same architecture at least."""
    if model.layout.signature == layout.signature:
        return
    ours = {b.name: b.shape for b in layout.blocks}
    theirs = {b.name: b.shape for b in model.layout.blocks}
    odd = next(n for n in (*ours, *theirs) if ours.get(n) != theirs.get(n))
    raise InputError(
        "BANK-LAYOUT",
        f"'{model.label}' has other blocks than the bank",
        key=odd,
        expected=f"{ours.get(odd, 'no such block')}; {len(ours)} blocks in all",
        found=f"{theirs.get(odd, 'no such block')}; {len(theirs)} blocks ({model.layout.scheme})",
        fix=f"use the bank's base, {base.label}, and --scheme {layout.scheme}",
    )
