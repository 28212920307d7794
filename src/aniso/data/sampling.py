"""Random choices that depend on a seed and on what a sample is called, never on order or on workers."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence


def number(*words: Hashable) -> int:
    """64 bits that are random, and the same everywhere, for these words."""
    text = "\x1f".join(str(word) for word in words)
    return int.from_bytes(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
    )


def shuffled(ids: Sequence[str], *words: Hashable) -> list[int]:
    """Indices in random order; the order of the ids themselves plays no part."""
    return sorted(range(len(ids)), key=lambda i: (number(*words, ids[i]), ids[i]))


def by_class(labels: Sequence[int], order: Sequence[int]) -> dict[int, list[int]]:
    """For every class that occurs its samples, in the given order."""
    found: dict[int, list[int]] = {}
    for i in order:
        found.setdefault(labels[i], []).append(i)
    return dict(sorted(found.items()))


def stratified(ids: Sequence[str], labels: Sequence[int], count: int, *words: Hashable) -> list[int]:
    """``count`` samples, from every class about its share; fewer are part of more."""
    ranked = []
    groups = by_class(labels, shuffled(ids, *words))
    # starts spread evenly, in random order: rounding favours no class, and hits the count for all together
    starts = sorted(groups, key=lambda label: number(*words, "class", label))
    for place, label in enumerate(starts):
        start, members = (place + 0.5) / len(starts), groups[label]
        ranked += [((i + start) / len(members), ids[member], member) for i, member in enumerate(members)]
    return sorted(i for _, _, i in sorted(ranked)[:count])


def per_class(ids: Sequence[str], labels: Sequence[int], count: int, *words: Hashable) -> list[int]:
    """``count`` samples of every class, or all it has."""
    groups = by_class(labels, shuffled(ids, *words))
    return sorted(i for members in groups.values() for i in members[:count])
