"""Random choices that depend on a seed and the names of samples, never on their order or on workers."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence


def number(*words: Hashable) -> int:
    """Return a 64-bit hash of these words, the same on every machine."""
    text = "\x1f".join(str(word) for word in words)
    return int.from_bytes(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
    )


def shuffled(ids: Sequence[str], *words: Hashable) -> list[int]:
    """Return the indices in random order, which does not depend on the order of the ids."""
    return sorted(range(len(ids)), key=lambda i: (number(*words, ids[i]), ids[i]))


def by_class(labels: Sequence[int], order: Sequence[int]) -> dict[int, list[int]]:
    """Return the samples of every class that occurs, in the given order."""
    found: dict[int, list[int]] = {}
    for i in order:
        found.setdefault(labels[i], []).append(i)
    return dict(sorted(found.items()))


def stratified(ids: Sequence[str], labels: Sequence[int], count: int, *words: Hashable) -> list[int]:
    """Return ``count`` samples in proportion to the classes; a smaller count gives a subset."""
    ranked = []
    groups = by_class(labels, shuffled(ids, *words))
    # starts spread evenly, in random order: rounding favours no class, and hits the count for all together
    starts = sorted(groups, key=lambda label: number(*words, "class", label))
    for place, label in enumerate(starts):
        start, members = (place + 0.5) / len(starts), groups[label]
        ranked += [((i + start) / len(members), ids[member], member) for i, member in enumerate(members)]
    return sorted(i for _, _, i in sorted(ranked)[:count])


def per_class(ids: Sequence[str], labels: Sequence[int], count: int, *words: Hashable) -> list[int]:
    """Return ``count`` samples of every class, or all that it has."""
    groups = by_class(labels, shuffled(ids, *words))
    return sorted(i for members in groups.values() for i in members[:count])


def folds(ids: Sequence[str], labels: Sequence[int], count: int, *words: Hashable) -> list[list[int]]:
    """Return ``count`` disjoint groups of samples with equal shares of every class, as far as possible.

    The only sample of a class is in no group, so that all others together always have every class.
    """
    out: list[list[int]] = [[] for _ in range(count)]
    place = 0
    for members in by_class(labels, shuffled(ids, *words)).values():
        for member in members if len(members) > 1 else ():
            out[place % count].append(member)
            place += 1
    return [sorted(group) for group in out if group]
