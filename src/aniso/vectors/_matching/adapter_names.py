"""Matching of an adapter's tensor names with a base that may name them differently."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from aniso.errors import InputError, printable
from aniso.vectors.block import Block, Layout, Part, Place, tied_names
from aniso.vectors.block_source import BlockSource
from aniso.vectors.naming import PLAIN, TEXT, VISION, Rule, expanded
from aniso.weights import PeftAdapter

Find = Callable[[str], tuple[Place, ...]]


def place_finder(base: BlockSource, keys: list[str], adapter: PeftAdapter) -> tuple[Find, list[str]]:
    """Return a function from an adapter's key to its place in the base, and notes on the rule it uses.

    The keys may be the base's own, or those of either library for a complete CLIP, with or without a prefix.
    A prefix is used only if it fits every key, and no other prefix that does leads to other places.
    """
    _refuse_text_encoder(adapter, keys, base.layout)
    namings = [_standard_names(base.layout)] if base.layout.scheme != PLAIN else []
    if not (namings and _is_bare(base.layout) and adapter.settings.base_class in _WHOLE_MODELS):
        namings.insert(0, _own_names(base))
    for known in namings:
        if all(key in known for key in keys):
            return _Fit("", "", known, len(keys)), []
    fits = [fit for known in namings for fit in _fits(keys, known)]
    whole = _distinct([fit for fit in fits if fit.matched == len(keys)], keys)
    if len(whole) > 1 and base.layout.scheme != PLAIN and "Vision" in (adapter.settings.base_class or ""):
        whole = [fit for fit in whole if fit(keys[0])]
    if len(whole) > 1:
        raise keys_error(
            adapter,
            f"'{adapter.label}' fits more than one part of the base",
            [str(fit) for fit in whole],
            "give as the base just the part that the adapter was trained on",
        )
    if whole:
        return whole[0], [f"names read with {whole[0]}"]
    # some key has no place under any rule; the best rule gives the most useful error
    return max(fits, key=lambda fit: fit.matched, default=_Fit("", "", namings[0], 0)), []


@dataclass(frozen=True)
class _Fit:
    """A prefix to remove and one to add, and the number of keys that are known then."""

    taken: str
    added: str
    known: Mapping[str, tuple[Place, ...]]
    matched: int

    def __call__(self, key: str) -> tuple[Place, ...]:
        return self.known.get(self.added + key.removeprefix(self.taken), ())

    def __str__(self) -> str:
        return f"'{self.added}' in place of '{self.taken}'"


def _fits(keys: list[str], known: Mapping[str, tuple[Place, ...]]) -> list[_Fit]:
    found: dict[tuple[str, str], None] = {}
    for key in keys[:1]:
        for name in known:
            if name.endswith(f".{key}"):
                found["", name.removesuffix(key)] = None
            elif key.endswith(f".{name}") and not _names_a_tower(key.removesuffix(name)):
                found[key.removesuffix(name), ""] = None
    return [
        _Fit(t, a, known, sum(k.startswith(t) and a + k.removeprefix(t) in known for k in keys))
        for t, a in found
    ]


def _names_a_tower(prefix: str) -> bool:
    """True if a prefix names a tower, so that it is part of the name and not a wrapper's."""
    parts = prefix.split(".")
    return any(part.startswith("text") or part in ("visual", "vision_model") for part in parts)


def _distinct(fits: list[_Fit], keys: list[str]) -> list[_Fit]:
    """Return the fits that lead to different places."""
    found: dict[tuple[tuple[Place, ...], ...], _Fit] = {}
    for fit in fits:
        places = tuple(tuple(Place(p.block, replace(p.part, key="")) for p in fit(key)) for key in keys)
        found.setdefault(places, fit)
    return list(found.values())


# Adapters of these name both towers' layers, so their names are never those of a bare encoder.
_WHOLE_MODELS = ("CLIP", "CLIPModel", "CustomTextCLIP")


def _refuse_text_encoder(adapter: PeftAdapter, keys: list[str], layout: Layout) -> None:
    """Raise for an adapter of the text tower, whose layers have the same names as the image tower's."""
    made_for = adapter.settings.base_class or ""
    if layout.scheme != PLAIN and "Text" in made_for and made_for not in _WHOLE_MODELS:
        raise keys_error(
            adapter,
            f"'{adapter.label}' was trained on a text encoder",
            keys,
            "use an adapter of the image encoder",
        )


def _is_bare(layout: Layout) -> bool:
    """True if the base's names do not tell that they belong to the image encoder."""
    keys = (part.key for block in layout.blocks for part in block.parts)
    return not any(mark in f".{key}" for key in keys for mark in (".visual.", ".vision_model."))


def _own_names(base: BlockSource) -> dict[str, tuple[Place, ...]]:
    """Return places by the base's own names; tensors outside of task vectors have none."""
    known: dict[str, tuple[Place, ...]] = dict(base.layout.places)
    known |= {part.key: () for block in base.layout.outside for part in block.parts if part.key not in known}
    known |= {name: known[first] for name, first in tied_names(base.source).items() if first in known}
    return known


def _standard_names(layout: Layout) -> dict[str, tuple[Place, ...]]:
    """Return places by the names of both libraries for the tensors of a complete CLIP."""
    both = (*layout.blocks, *layout.outside)
    depth = 1 + max((b.depth for b in both if b.depth is not None), default=-1)
    known: dict[str, tuple[Place, ...]] = {}
    for rule in expanded(TEXT, depth):
        known |= dict.fromkeys((rule.open_clip, *rule.hugging_face), ())
    for rule in expanded(VISION, depth):
        known |= _both_names(rule, layout.by_name)
    return known


def _both_names(rule: Rule, blocks: Mapping[str, Block]) -> dict[str, tuple[Place, ...]]:
    """Yield a rule's block, or its three separate blocks, under the names of both libraries."""
    places, row = [], 0
    for name in (rule.open_clip, *(f"{rule.open_clip}.{x}" for x in "qkv")):
        if name in blocks:
            rows = blocks[name].shape[0] if blocks[name].shape else 1
            places.append(Place(blocks[name], Part("", 0, rows, offset=row)))
            row += rows
    if not places:
        return {}
    out = {rule.open_clip: tuple(places)}
    share = row // len(rule.hugging_face)
    for i, name in enumerate(rule.hugging_face):
        place = next(p for p in reversed(places) if p.part.offset <= i * share)
        first = i * share - place.part.offset
        out[name] = (Place(place.block, Part("", first, first + share, transposed=rule.transposed)),)
    return out


def keys_error(adapter: PeftAdapter, message: str, names: list[str], fix: str) -> InputError:
    return InputError(
        "LORA-KEYS",
        message,
        found=[printable(name) for name in names[:8]],
        more=f"{len(names) - 8} more" if len(names) > 8 else "",
        trained_on=printable(adapter.settings.base_model or adapter.settings.base_class or "unknown"),
        fix=fix,
    )
