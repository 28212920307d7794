"""The start of a run: what its text names, made for the run's bank and partition."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from aniso.compose import Partition
from aniso.experiments.banks import load_coefficients
from aniso.experiments.merging import merge_rule, merged_vector, planned_vector
from aniso.experiments.run_files import MERGED
from aniso.learn import Start, starts
from aniso.start_text import StartText, parse_start
from aniso.vectors.task_vector import stored_vector
from aniso.weights.atomic import make_directory

if TYPE_CHECKING:
    from aniso.experiments.methods.composing import ComposingMethod
    from aniso.experiments.session import Session
    from aniso.vectors import Bank


def starting_point(session: Session, method: ComposingMethod) -> Start | None:
    """Return where a method's coefficients start; None for zero."""
    if method.start is None:
        return None
    text = parse_start(method.start)
    partition = method.resolved_partition(session.setting.seed)
    found = (
        _from_rule(session, method, text.name, partition)
        if text.rule
        else _from_text(session, text, partition)
    )
    return found.scaled(method.start_scale)


def _from_text(session: Session, text: StartText, partition: Partition) -> Start:
    bank = session.bank
    if text.file is not None:
        found = _from_file(bank, text.file, partition)
        _keep_merged(session, found.bank)
        return found
    if text.kind == "constant":
        return starts.constant(bank, text.numbers[0], partition)
    if text.kind == "depth":
        return starts.depth_profile(bank, text.numbers, partition)
    return starts.least_squares(bank, partition, ridge=text.numbers[0])


def _from_file(bank: Bank, file: Path, partition: Partition) -> Start:
    """Return the start at a file of coefficients, at a run, or at a file that holds a vector."""
    vector = stored_vector(str(file)) if file.is_file() else None
    if vector is not None:
        return starts.from_vector(bank, vector, partition)
    joined, coefficients = load_coefficients(bank, file)
    return starts.from_coefficients(joined, coefficients, partition)


def _keep_merged(session: Session, joined: Bank) -> None:
    """Write a merged vector of another run or file beside this run's coefficients, which need it."""
    directory = session.options.directory
    for name in joined:
        if name not in session.bank and directory is not None:
            make_directory(directory)
            joined[name].save(directory / MERGED, overwrite=True)


def _from_rule(session: Session, method: ComposingMethod, name: str, partition: Partition) -> Start:
    rule, how = merge_rule(name, method.merge_options)
    if rule.coefficient(len(session.bank)) is not None:
        return starts.from_rule(session.bank, rule, partition)
    session.bank.require_new([rule.kind])
    options = session.options
    vector = merged_vector(session.bank, rule, how, options.directory, options.progress)
    return starts.from_vector(session.bank, vector, partition)


def planned_bank(session: Session, method: ComposingMethod) -> Bank:
    """Return the vectors that will be composed, for plans: a merged one is not made yet."""
    text = None if method.start is None else parse_start(method.start)
    if text is None or text.rule is None:
        return session.composed_bank
    rule, how = merge_rule(text.rule, method.merge_options)
    if rule.coefficient(len(session.bank)) is not None:
        return session.bank
    return session.bank.with_vectors({rule.kind: planned_vector(session.bank, rule, how)})
