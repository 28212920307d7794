"""Learning in rounds: the difference of the last round's result to the base joins the bank (DV-BASI)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from aniso.compose import Composition, difference_vector, folded
from aniso.errors import UsageError
from aniso.vectors import Bank


def rounds_of(composition: Composition, count: int) -> Iterator[Composition]:
    """Yield the composition to fit in each of ``count`` rounds, fewer if a round changes nothing.

    The first is ``composition`` itself. Before every other round the difference vector, sum of coefficient *
    delta, joins the bank with coefficient 1, and all other coefficients start at 0, which is where the last
    round ended. The difference is a sum of the bank's vectors, so that after the round its coefficients are
    folded into theirs: once the loop has ended, ``composition`` has the result, of the bank alone::

        for model in rounds_of(composition, 3):
            fit(model, objective, schedule, keep=keep)
    """
    if count < 1:
        raise UsageError("USAGE", f"cannot learn in {count} rounds", expected="1 or more", fix="--rounds 3")
    yield composition
    for _ in range(1, count):
        before, name = composition.coefficients, _free_name(composition.bank)
        difference = difference_vector(composition.bank, before, name)
        if difference is None:
            return
        composition.release()  # the bank is in memory once
        vectors = {own: composition.bank[own] for own in composition.bank}
        extended = composition.with_bank(Bank({**vectors, name: difference}))
        with torch.no_grad():
            for entry in extended.index.blocks:
                if name in entry.vectors:
                    extended.values[extended.index.cell(name, entry.block.name)] = 1.0
        yield extended
        with torch.no_grad():
            composition.values.copy_(folded(extended.index, extended.values.cpu(), before, name))


def _free_name(bank: Bank) -> str:
    name = "difference"
    while name in bank:
        name += "+"
    return name
