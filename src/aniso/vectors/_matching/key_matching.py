"""Matching of a fine-tuned model with its base: names, shapes, and tensors outside of task vectors."""

from __future__ import annotations

import torch

from aniso.errors import InputError, printable
from aniso.vectors._matching.key_edits import KeyEdits
from aniso.vectors.block import Block, Kind, tied_names
from aniso.vectors.block_source import BlockSource, outside_pairs
from aniso.vectors.naming import HUGGING_FACE, PLAIN

_SHOWN = 8


def match_blocks(
    base: BlockSource, tuned: BlockSource, edits: KeyEdits
) -> tuple[list[tuple[Block, Block]], list[str]]:
    """Return pairs of base and tuned blocks by name, and notes on blocks that are absent by a known rule."""
    _check_activation(base, tuned)
    _refuse_linearised(tuned)
    _refuse_integers(base, tuned)
    theirs, notes = _untied(base, tuned)
    missing = [b for b in base.layout.blocks if b.name not in theirs]
    extra = [b for name, b in theirs.items() if name not in base.layout.by_name]
    absent, unexplained = _explained(tuned, missing, edits)
    _check_shapes(base, tuned, theirs)
    if unexplained or extra:
        raise _keys_error(base, tuned, unexplained, extra)
    pairs = [(b, theirs[b.name]) for b in base.layout.blocks if b.name in theirs]
    return pairs, [*notes, *absent, *_compare_outside(base, tuned)]


def _untied(base: BlockSource, tuned: BlockSource) -> tuple[dict[str, Block], list[str]]:
    """Return the tuned model's blocks under the base's names, where files store tied tensors differently.

    One file may hold a tied tensor under all of its names, another under one; a third may have untied it,
    which is the same model only if the values are equal.
    """
    theirs, notes = dict(tuned.layout.by_name), list[str]()
    mine, other = tied_names(base.source), tied_names(tuned.source)
    if base.layout.scheme != PLAIN or not (mine or other):
        return theirs, notes
    matched: dict[str, Block] = {}
    for block in base.layout.blocks:
        names = [block.name, *(n for n, first in mine.items() if first == block.name and n != first)]
        stored = list(dict.fromkeys(other.get(n, n) for n in names if n in tuned.source.tensors))
        found = [theirs[name] for name in stored if name in theirs]
        if not found:
            continue
        matched[block.name] = found[0]
        for copy in found[1:]:
            if copy.shape != found[0].shape or not torch.equal(tuned.read(copy), tuned.read(found[0])):
                raise InputError(
                    "CKPT-KEYS",
                    f"'{tuned.label}' has two tensors where base '{base.label}' has one under two names",
                    found=[printable(copy.name), printable(found[0].name)],
                    expected="equal values, as they are tied in the base",
                    fix="use a base in which they are not tied",
                )
        if len(found) > 1 or found[0].name != block.name:
            notes.append(f"{printable(block.name)} is tied to other names in one of the two files")
    # every name of a matched tensor, here or in the base, is accounted for
    used = {block.name for block in matched.values()}
    used |= {other.get(n, n) for n, first in mine.items() if first in matched}
    return matched | {n: b for n, b in theirs.items() if n not in used}, notes


def _refuse_integers(base: BlockSource, tuned: BlockSource) -> None:
    for block in base.layout.blocks:
        for part in block.parts:
            info = tuned.source.tensors.get(part.key)
            if info is not None and not info.is_float:
                raise InputError(
                    "WEIGHT-DTYPE",
                    f"'{tuned.label}' has a weight that is not a float",
                    key=part.key,
                    found=info.dtype,
                    expected="F16, BF16, F32 or F64",
                    fix="convert it to BF16 with the tool that quantised it",
                )


def _explained(tuned: BlockSource, missing: list[Block], edits: KeyEdits) -> tuple[list[str], list[Block]]:
    notes, unexplained = [], []
    for block in missing:
        if edits.skips(block.name, *(part.key for part in block.parts)):
            notes.append(f"block {block.name} is absent, as asked for")
        elif block.name == "visual.proj" and tuned.layout.scheme == HUGGING_FACE:
            notes.append("block visual.proj is absent: a CLIPVisionModel is saved without its projection")
        else:
            unexplained.append(block)
    return notes, unexplained


def _check_activation(base: BlockSource, tuned: BlockSource) -> None:
    if base.activation and tuned.activation and base.activation != tuned.activation:
        raise InputError(
            "CKPT-ACTIVATION",
            f"'{tuned.label}' and base '{base.label}' use different activations",
            expected=base.activation,
            found=tuned.activation,
            likely="OpenAI's weights were loaded into a model with GELU, or the other way round",
            fix="use the base that the model was tuned from",
        )


def _refuse_linearised(tuned: BlockSource) -> None:
    if any(".params0." in f".{key}" or ".func0." in f".{key}" for key in tuned.source.tensors):
        raise InputError(
            "CKPT-LINEARISED",
            f"'{tuned.label}' is a linearised model, given as a standard one",
            fix="use a standard fine-tuned checkpoint",
        )


def _check_shapes(base: BlockSource, tuned: BlockSource, theirs: dict[str, Block]) -> None:
    differing = [
        (block, other)
        for block in base.layout.blocks
        if (other := theirs.get(block.name)) and other.shape != block.shape
    ]
    if not differing:
        return
    block, other = differing[0]
    more = f"   … {len(differing) - 1} more blocks differ" if len(differing) > 1 else ""
    raise InputError(
        "CKPT-SHAPE",
        f"'{tuned.label}' does not fit base '{base.label}'",
        key=other.parts[0].key,
        expected=f"{block.shape}   found {other.shape}{more}",
        likely=_likely(len(differing), len(base.layout.blocks)),
        fix="aniso inspect both, and use the base that the model was tuned from",
    )


def _likely(differing: int, total: int) -> str:
    if differing * 2 > total:
        return "the file is a model of another size"
    return "the model was tuned at another resolution or with another number of classes"


def _keys_error(
    base: BlockSource, tuned: BlockSource, missing: list[Block], extra: list[Block]
) -> InputError:
    return InputError(
        "CKPT-KEYS",
        f"'{tuned.label}' and base '{base.label}' have different names",
        missing=_listed(missing),
        extra=_listed(extra),
        naming=f"base {base.layout.scheme}, tuned {tuned.layout.scheme}",
        fix="--skip-key PATTERN leaves keys out, --rename OLD=NEW renames them",
    )


def _listed(blocks: list[Block]) -> list[str]:
    names = [printable(b.parts[0].key if b.parts else b.name) for b in blocks[:_SHOWN]]
    if len(blocks) > _SHOWN:
        names.append(f"… {len(blocks) - _SHOWN} more")
    return names


def _compare_outside(base: BlockSource, tuned: BlockSource) -> list[str]:
    """Raise if a tensor outside of the vector differs, so that the vector would not give the model."""
    notes = []
    differing, statistics = [], 0
    for mine, theirs in outside_pairs(base, tuned):
        a, b = base.read_outside(mine).reshape(-1), tuned.read_outside(theirs).reshape(-1)
        if a.shape == b.shape and torch.equal(a.to(b.dtype), b):
            continue
        if mine.kind is Kind.STATISTIC or mine.name.endswith("num_batches_tracked"):
            statistics += 1
        else:
            differing.append(theirs)
    if differing:
        raise InputError(
            "CKPT-BUFFER",
            f"'{tuned.label}' differs from base '{base.label}' outside of the image encoder's weights",
            found=[f"{printable(b.parts[0].key)} ({b.kind})" for b in differing[:_SHOWN]],
            more=f"{len(differing) - _SHOWN} more" if len(differing) > _SHOWN else "",
            fix=f"--skip-key '{printable(differing[0].parts[0].key)}' keeps the base's",
        )
    if statistics:
        notes.append(f"{statistics} BatchNorm statistics differ; the base's are kept, model in eval mode")
    kinds = sorted({b.kind.value for b in base.layout.outside})
    if kinds:
        notes.append(f"kept from the base, never scaled: {', '.join(kinds)}")
    extra = {b.name for b in tuned.layout.outside} - {b.name for b in base.layout.outside}
    if extra:
        notes.append(f"not in the base and not used: {printable(', '.join(sorted(extra)))}")
    return notes
