"""Banks as settings name them, and where coefficients for them are kept."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from aniso.compose import Coefficients
from aniso.errors import UsageError
from aniso.experiments.run_files import COEFFICIENTS, MERGED, file_of
from aniso.experiments.settings import Setting
from aniso.records import Inputs
from aniso.vectors import Bank, TaskVector, random_bases
from aniso.weights import Ref


def open_bank(name: str | Path, base: Ref | None = None, *, seed: int = 0) -> Bank:
    """A bank by its directory, or one of those that come with the package by name.

    ``random:15`` is one of random bases over ``base``, drawn by ``seed``, or by that in ``random:15:3``.
    """
    drawn = re.fullmatch(r"random:([0-9]{1,9})(?::([0-9]{1,18}))?", str(name))
    if drawn is not None and not Path(name).exists():
        if base is None:
            raise UsageError("BANK-NAME", f"'{name}' is no bank on disk", fix="name a directory")
        return random_bases(base, int(drawn[1]), seed if drawn[2] is None else int(drawn[2]))
    return Bank.load(name)


def load_coefficients(bank: Bank, file: Path) -> tuple[Bank, Coefficients]:
    """Return a bank and coefficients in a file, or of a run; a merged vector beside them joins the bank.

    A run that starts at a merged vector, or merges alone, writes that vector beside its coefficients. It
    joins if the coefficients need it, in place of a vector of the same name.
    """
    path = file_of(file, COEFFICIENTS)
    found, beside = Coefficients.load(path), path.parent / MERGED
    merged = TaskVector.load(beside) if beside.is_file() else None
    if merged is None or merged.name not in found.vectors:
        return bank, found
    others = [name for name in bank if name != merged.name]
    joined = {merged.name: merged}
    return (bank.only(*others).with_vectors(joined) if others else Bank(joined)), found


def coefficients_file(setting: Setting, inputs: Inputs) -> str:
    """Return the file name of a setting's coefficients, the same with and without a head learned afterwards.

    It depends on the model, the data and the content that was learned from; the bank is in the file itself.
    """
    learned = (inputs.content_hashes or {}).get("learned", {})
    known = json.dumps([inputs.model, inputs.data, learned], sort_keys=True)
    return f"{setting.coefficients_id[:16]}-{hashlib.sha256(known.encode()).hexdigest()[:16]}.safetensors"
