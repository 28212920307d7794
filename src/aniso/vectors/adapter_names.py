"""Where the tensors of an adapter belong in a base that may name them differently."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from aniso.errors import InputError, printable
from aniso.vectors.block import Block, Layout, Part, Place
from aniso.vectors.naming import PLAIN, TEXT, VISION, Rule, expanded
from aniso.weights import PeftAdapter

Find = Callable[[str], tuple[Place, ...]]


def place_finder(layout: Layout, keys: list[str], adapter: PeftAdapter) -> tuple[Find, list[str]]:
    """How to find the places of the adapter's keys, by one rule for all of them, and notes on it.

    The keys may be the base's own, the other library's, or either under or without a prefix. A prefix
    counts only if it fits every key, and only if it is the only one that does.
    """
    known = _known_names(layout)
    if all(key in known for key in keys):
        return lambda key: known.get(key, ()), []
    fitting: dict[tuple[str, str], None] = {}
    for taken, added in _prefixes(keys[0], known) if keys else ():
        if all(key.startswith(taken) and added + key.removeprefix(taken) in known for key in keys):
            fitting[taken, added] = None
    if len(fitting) > 1 and layout.scheme != PLAIN:
        fitting = _of_image_encoder(fitting, keys, known, adapter)
    if len(fitting) > 1:
        raise keys_error(
            adapter,
            f"'{adapter.label}' fits more than one part of the base",
            [f"'{added}' in place of '{taken}'" for taken, added in fitting],
            "give as the base just the part that the adapter was trained on",
        )
    taken, added = next(iter(fitting), ("", ""))
    notes = [f"names read with '{added}' in place of '{taken}'"] if fitting else []
    return lambda key: known.get(added + key.removeprefix(taken), ()), notes


def _of_image_encoder(
    fitting: dict[tuple[str, str], None],
    keys: list[str],
    known: Mapping[str, tuple[Place, ...]],
    adapter: PeftAdapter,
) -> dict[tuple[str, str], None]:
    """Both towers of a CLIP name their layers alike; the class it was trained on may tell which it is."""
    made_for = adapter.settings.base_class or ""
    if "Text" in made_for:
        raise keys_error(
            adapter,
            f"'{adapter.label}' was trained on a text encoder",
            keys,
            "use an adapter of the image encoder",
        )
    if "Vision" not in made_for:
        return fitting
    return {(t, a): None for t, a in fitting if known[a + keys[0].removeprefix(t)]}


def _prefixes(key: str, known: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Prefixes to take off and to put on that make this key a known one."""
    for name in known:
        if name.endswith(f".{key}"):
            yield "", name.removesuffix(key)
        elif key.endswith(f".{name}"):
            yield key.removesuffix(name), ""


def _known_names(layout: Layout) -> dict[str, tuple[Place, ...]]:
    """Places by every name a tensor may have; those outside of task vectors have none."""
    known: dict[str, tuple[Place, ...]] = dict(layout.places)
    known |= {part.key: () for block in layout.outside for part in block.parts if part.key not in known}
    if layout.scheme == PLAIN:
        return known
    both = (*layout.blocks, *layout.outside)
    depth = 1 + max((b.depth for b in both if b.depth is not None), default=-1)
    for rule in expanded(VISION, depth):
        for name, places in _both_names(rule, layout.by_name).items():
            known.setdefault(name, places)
    for rule in expanded(TEXT, depth):
        for name in (rule.open_clip, *rule.hugging_face):
            known.setdefault(name, ())
    return known


def _both_names(rule: Rule, blocks: Mapping[str, Block]) -> dict[str, tuple[Place, ...]]:
    """A rule's block, or its thirds where they are blocks of their own, under both libraries' names."""
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
