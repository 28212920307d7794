"""Plausibility checks: does a difference look like fine-tuning of this base?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from aniso.errors import InputError
from aniso.vectors.block import Layout
from aniso.weights.dtypes import relative_rounding

# ‖difference‖ / ‖base‖ of a typical weight matrix: fine-tuning stays below a few per cent, two models
# trained apart are at about sqrt(2).
WARN_RATIO = 0.25
REFUSE_RATIO = 0.8
NOISE_WARNING = 0.05
# The same of a single weight matrix. Of 21 small models, fully tuned ones stay below 0.46 in every matrix,
# adapters of rank 4 below 0.81: what is reported is rare, what is refused no fine-tuning.
WARN_BLOCK = 1.0
REFUSE_BLOCK = 10.0
_SMALL_SLACK = 100.0  # biases and gains may start at zero, and are compared with a typical weight instead
_LISTED = 4


def check_plausible(
    name: str,
    layout: Layout,
    norms: Mapping[str, float],
    base_norms: Mapping[str, float],
    dtypes: Mapping[str, str],
    *,
    allow_distant: bool = False,
) -> list[str]:
    """Return notes on a vector with these block norms; raises if it is no plausible fine-tuning of the base.

    ``dtypes`` are the stored dtypes of the tuned model's blocks.
    """
    if not any(norms.values()):
        raise InputError(
            "VECTOR-ZERO",
            f"'{name}' equals the base in every block: nothing was fine-tuned",
            fix="check that the file is the fine-tuned model and not a copy of the base",
        )
    notes = []
    zero = [block for block, norm in norms.items() if norm == 0]
    if zero:
        notes.append(_listed(zero))
    notes += _distance(name, layout, norms, base_norms, allow_distant)
    notes += _outliers(name, layout, norms, base_norms, allow_distant)
    return [*notes, *_rounding(norms, base_norms, dtypes)]


def _listed(zero: list[str]) -> str:
    more = ", …" if len(zero) > 4 else ""
    return f"{len(zero)} blocks did not change and are absent: {', '.join(zero[:4])}{more}"


def _distance(
    name: str,
    layout: Layout,
    norms: Mapping[str, float],
    base_norms: Mapping[str, float],
    allow_distant: bool,
) -> list[str]:
    # matrices only: biases may start at zero, where any change is large
    ratios = {
        b.name: norms[b.name] / base_norms[b.name]
        for b in layout.blocks
        if len(b.shape) > 1 and norms.get(b.name) and base_norms.get(b.name)
    }
    if not ratios:
        return []
    typical = statistics.median(ratios.values())
    worst = max(ratios, key=ratios.__getitem__)
    if typical > REFUSE_RATIO and not allow_distant:
        raise InputError(
            "VECTOR-DISTANT",
            f"'{name}' is too far from the base to be fine-tuned from it",
            found=f"a typical block changed by {typical:.0%} of its norm; {worst} by {ratios[worst]:.0%}",
            expected=f"at most {REFUSE_RATIO:.0%}",
            likely="the model was tuned from other pre-trained weights of the same shape",
            fix="use the base that it was tuned from; --allow-distant if you are sure",
        )
    if typical > WARN_RATIO:
        return [f"warning: a typical block changed by {typical:.0%} of its norm; is the base right?"]
    return []


def _outliers(
    name: str,
    layout: Layout,
    norms: Mapping[str, float],
    base_norms: Mapping[str, float],
    allow_distant: bool,
) -> list[str]:
    """Return a warning on blocks that changed more than fine-tuning does; raises if by far more."""
    changes = _changes(layout, norms, base_norms)
    small = {block.name for block in layout.blocks if len(block.shape) < 2}
    excess = {b: change / (_SMALL_SLACK if b in small else 1.0) for b, change in changes.items()}
    worst = sorted((block for block in excess if excess[block] > WARN_BLOCK), key=lambda b: -excess[b])
    if not worst:
        return []
    shown = [f"{block} by {changes[block]:,.3g} times the base's size" for block in worst[:_LISTED]]
    if excess[worst[0]] > REFUSE_BLOCK and not allow_distant:
        raise InputError(
            "VECTOR-DISTANT",
            f"'{name}' has {len(worst)} blocks that are too far from the base to be fine-tuned from it",
            found=shown,
            expected=f"weights at most {REFUSE_BLOCK:g} times, biases {REFUSE_BLOCK * _SMALL_SLACK:,g} times",
            likely="values were damaged or scaled, or training diverged",
            fix="look at the file with: aniso inspect; --allow-distant if you are sure",
        )
    more = ", …" if len(worst) > _LISTED else ""
    return [f"warning: {len(worst)} blocks changed more than fine-tuning does: {', '.join(shown)}{more}"]


def _changes(layout: Layout, norms: Mapping[str, float], base_norms: Mapping[str, float]) -> dict[str, float]:
    """Return how far each block moved, as a multiple of its norm in the base.

    A block that is smaller there than a typical weight matrix, element by element, is compared with that one:
    it may have started at zero, where any change is large.
    """
    root = {block.name: math.sqrt(block.numel) for block in layout.blocks if block.numel}
    matrices = [block.name for block in layout.blocks if len(block.shape) > 1 and base_norms.get(block.name)]
    if not matrices:
        return {}
    typical = statistics.median(base_norms[block] / root[block] for block in matrices)
    return {
        block: norms[block] / max(base_norms.get(block, 0.0), typical * root[block])
        for block in root
        if norms.get(block)
    }


def _rounding(
    norms: Mapping[str, float], base_norms: Mapping[str, float], dtypes: Mapping[str, str]
) -> list[str]:
    """Return notes on the share of a difference that is rounding error of narrow dtypes."""
    narrow = {block: dtype for block, dtype in dtypes.items() if dtype in ("F16", "BF16")}
    notes = []
    if "F64" in dtypes.values():
        notes.append("stored as F64, computed in float32")
    if not narrow:
        return notes
    signal = math.sqrt(sum(n * n for n in norms.values()))
    noise = math.sqrt(
        sum((relative_rounding(dtype) * base_norms.get(block, 0.0)) ** 2 for block, dtype in narrow.items())
    )
    kinds = " and ".join(sorted(set(narrow.values())))
    text = f"stored as {kinds}, rounding is about {noise / signal:.1%} of the difference"
    return [*notes, f"warning: {text}" if noise / signal > NOISE_WARNING else text]
