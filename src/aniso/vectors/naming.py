"""The two names of every CLIP tensor: open_clip's, which blocks have, and Hugging Face's.

A rule pairs one open_clip tensor with the Hugging Face tensors that make it up. ``{i}`` is a layer's number.
open_clip fuses query, key and value; the two libraries store projections transposed to each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from aniso.errors import InputError, printable


@dataclass(frozen=True)
class Rule:
    """One open_clip tensor and the Hugging Face tensors whose rows, in order, are the same numbers."""

    open_clip: str
    hugging_face: tuple[str, ...]
    transposed: bool = False


def _same(open_clip: str, hugging_face: str) -> list[Rule]:
    return [Rule(f"{open_clip}.{end}", (f"{hugging_face}.{end}",)) for end in ("weight", "bias")]


def _fused(open_clip: str, hugging_face: str) -> list[Rule]:
    return [
        Rule(f"{open_clip}_{end}", tuple(f"{hugging_face}.{x}_proj.{end}" for x in "qkv"))
        for end in ("weight", "bias")
    ]


def _layer(open_clip: str, hugging_face: str) -> list[Rule]:
    ours, theirs = f"{open_clip}.resblocks.{{i}}", f"{hugging_face}.encoder.layers.{{i}}"
    return [
        *_same(f"{ours}.ln_1", f"{theirs}.layer_norm1"),
        *_fused(f"{ours}.attn.in_proj", f"{theirs}.self_attn"),
        *_same(f"{ours}.attn.out_proj", f"{theirs}.self_attn.out_proj"),
        *_same(f"{ours}.ln_2", f"{theirs}.layer_norm2"),
        *_same(f"{ours}.mlp.c_fc", f"{theirs}.mlp.fc1"),
        *_same(f"{ours}.mlp.c_proj", f"{theirs}.mlp.fc2"),
    ]


VISION: tuple[Rule, ...] = (
    Rule("visual.class_embedding", ("vision_model.embeddings.class_embedding",)),
    Rule("visual.positional_embedding", ("vision_model.embeddings.position_embedding.weight",)),
    Rule("visual.conv1.weight", ("vision_model.embeddings.patch_embedding.weight",)),
    *_same("visual.ln_pre", "vision_model.pre_layrnorm"),  # Hugging Face's own spelling
    *_layer("visual.transformer", "vision_model"),
    *_same("visual.ln_post", "vision_model.post_layernorm"),
    Rule("visual.proj", ("visual_projection.weight",), transposed=True),
)

TEXT: tuple[Rule, ...] = (
    Rule("token_embedding.weight", ("text_model.embeddings.token_embedding.weight",)),
    Rule("positional_embedding", ("text_model.embeddings.position_embedding.weight",)),
    *_layer("transformer", "text_model"),
    *_same("ln_final", "text_model.final_layer_norm"),
    Rule("text_projection", ("text_projection.weight",), transposed=True),
    Rule("logit_scale", ("logit_scale",)),
)


def expanded(rules: Iterable[Rule], layers: int) -> list[Rule]:
    """Return the rules with layer numbers filled in, layer by layer."""
    rules = list(rules)
    repeated = [r for r in rules if "{i}" in r.open_clip]
    first = rules.index(repeated[0])
    filled = [
        replace(
            r,
            open_clip=r.open_clip.format(i=i),
            hugging_face=tuple(name.format(i=i) for name in r.hugging_face),
        )
        for i in range(layers)
        for r in repeated
    ]
    return [*rules[:first], *filled, *(r for r in rules[first:] if r not in repeated)]


@dataclass(frozen=True)
class Names:
    """A file's keys by the standard names of their family."""

    scheme: str
    keys: Mapping[str, str]
    """Standard name to the key in the file."""


HUGGING_FACE = "hf-clip-vit"
OPEN_CLIP = "openclip-vit"
OPEN_CLIP_OTHER = "openclip-visual"
PLAIN = "plain"
SCHEMES = (HUGGING_FACE, OPEN_CLIP, OPEN_CLIP_OTHER, PLAIN)

# One tensor identifies each family, and shows the prefix before its names.
_HF_MARK = re.compile(r"^(?P<prefix>(?:.*\.)?)embeddings\.class_embedding$")
_OPEN_CLIP_MARK = re.compile(r"^(?P<prefix>(?:.*\.)?)class_embedding$")
_VISUAL_MARK = re.compile(r"^(?P<prefix>(?:(?!visual\.).)*?)visual\.")


def recognise(keys: Iterable[str]) -> Names:
    """Return the naming scheme of these keys, whatever their prefix."""
    known = set(keys)
    return _hugging_face(known) or _open_clip_vit(known) or _open_clip_other(known) or Names(
        PLAIN, {key: key for key in sorted(known)}
    )  # fmt: skip


def _hugging_face(keys: set[str]) -> Names | None:
    prefix = _prefix(keys, _HF_MARK)
    if prefix is None or f"{prefix}encoder.layers.0.self_attn.q_proj.weight" not in keys:
        return None
    outer = prefix.removesuffix("vision_model.")
    # transformers 5 saves a bare vision model without its prefix
    bare = not prefix.endswith("vision_model.")
    add = "vision_model." if bare else ""
    return Names(HUGGING_FACE, _standard(keys, outer, add, "visual_projection.weight"))


def _open_clip_vit(keys: set[str]) -> Names | None:
    prefix = _prefix(keys, _OPEN_CLIP_MARK)
    if prefix is None or f"{prefix}transformer.resblocks.0.attn.in_proj_weight" not in keys:
        return None
    outer = prefix.removesuffix("visual.")
    bare = not prefix.endswith("visual.")
    return Names(OPEN_CLIP, _standard(keys, outer, "visual." if bare else ""))


def _open_clip_other(keys: set[str]) -> Names | None:
    """Recognise ResNets and timm towers of open_clip: names under ``visual.`` beside a text tower."""
    prefixes = {m["prefix"] for key in keys if (m := _VISUAL_MARK.match(key))}
    if len(prefixes) != 1:
        return None
    (prefix,) = prefixes
    if f"{prefix}logit_scale" not in keys:
        return None
    return Names(OPEN_CLIP_OTHER, _standard(keys, prefix, ""))


def _standard(keys: set[str], outer: str, add: str, never: str = "") -> dict[str, str]:
    """Return standard names: ``outer`` removed, ``add`` added; raises if two keys get the same name."""
    standard: dict[str, str] = {}
    for key in sorted(keys):
        local = key.removeprefix(outer)
        name = local if local == never else add + local
        if name in standard:
            raise InputError(
                "CKPT-AMBIGUOUS",
                "two tensors have the same name without their prefix",
                found=[printable(standard[name]), printable(key)],
                fix=f"leave one out with --skip-key '{printable(key)}'",
            )
        standard[name] = key
    return standard


def _prefix(keys: set[str], mark: re.Pattern[str]) -> str | None:
    found = {m["prefix"] for key in keys if (m := mark.match(key))}
    return next(iter(found)) if len(found) == 1 else None


def layers_of(rules: Iterable[Rule], names: Iterable[str]) -> int:
    """Return the number of layers of one tower, from the standard names of either library."""
    mark = next(rule for rule in rules if "{i}" in rule.open_clip)
    templates = (mark.open_clip, mark.hugging_face[0])
    pattern = re.compile("|".join(re.escape(t).replace(r"\{i\}", r"([0-9]{1,6})") for t in templates))
    numbers = [int(m[1] or m[2]) for name in names if (m := pattern.fullmatch(name))]
    return max(numbers, default=-1) + 1
