"""Learning in rounds: the difference of the last round's result to the base joins the bank (DV-BASI)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from aniso.compose import Composition, difference_vector, folded
from aniso.errors import UsageError
from aniso.learn.fit import Fit
from aniso.vectors import Bank


def fit_rounds(
    composition: Composition, rounds: int, fit_round: Callable[[Composition, int], Fit]
) -> tuple[Fit, ...]:
    """Learn coefficients in rounds; returns the result of each, fewer if a round changes nothing.

    ``fit_round`` fits a composition in a round, from 1 on. The first round fits ``composition``. Before every
    other one the difference vector, sum of coefficient * delta, joins the bank with coefficient 1, and all
    other coefficients start at 0, which is where the last round ended. The difference is a sum of the bank's
    vectors, so that afterwards its coefficients are folded into theirs: the result is always one of the bank
    alone, and is put into ``composition``::

        fits = fit_rounds(composition, 3, lambda model, number: fit(model, objective, schedule, keep=keep))
    """
    if rounds < 1:
        raise UsageError("USAGE", f"cannot learn in {rounds} rounds", expected="1 or more", fix="rounds=3")
    done = [fit_round(composition, 1)]
    for number in range(2, rounds + 1):
        before = composition.coefficients
        name = _free_name(composition.bank)
        difference = difference_vector(composition.bank, before, name)
        if difference is None:
            break
        composition.release()  # the bank is in memory once
        vectors = {own: composition.bank[own] for own in composition.bank}
        extended = composition.with_bank(Bank({**vectors, name: difference}))
        with torch.no_grad():
            for entry in extended.index.blocks:
                if name in entry.vectors:
                    extended.values[extended.index.cell(name, entry.block.name)] = 1.0
        fit = fit_round(extended, number)
        with torch.no_grad():
            values = folded(extended.index, extended.values.detach().cpu(), before, name)
            composition.values.copy_(values)
        done.append(replace(fit, coefficients=composition.coefficients))
    return tuple(done)


def _free_name(bank: Bank) -> str:
    name = "difference"
    while name in bank:
        name += "+"
    return name
