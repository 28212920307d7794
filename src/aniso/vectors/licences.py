"""Licences of the models that vectors were made from, kept as facts of a bank."""

from __future__ import annotations

from collections.abc import Mapping

from aniso.vectors.bank import Bank
from aniso.weights import Ref, open_weights
from aniso.weights.licence import stated_licence

LICENCE = "license"
"""The name of the fact, as model cards spell it."""


def keep_licences(bank: Bank, tuned: Mapping[str, Ref]) -> Bank:
    """Write the licences that the directories of fine-tuned models state to the bank on disk."""
    stated = {name: stated_licence(open_weights(ref).info.home) for name, ref in tuned.items()}
    known = {name: {LICENCE: licence} for name, licence in stated.items() if licence is not None}
    return bank.annotate(known) if known else bank


def agreed_licence(bank: Bank, base: str | None) -> str | None:
    """Return the licence of the base and of all vectors, or None if one differs or is not known."""
    stated = {base, *(bank.facts[name].get(LICENCE) for name in bank)}
    return base if len(stated) == 1 else None
