"""Merge rules within runs: their options as text, and the vector that a rule makes of a run's bank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from aniso.errors import UsageError, printable
from aniso.experiments.run_files import MERGED

if TYPE_CHECKING:
    from aniso.merge import MergeOptions, MergeRule
    from aniso.progress import ProgressCallback
    from aniso.vectors import Bank, TaskVector

MERGE_OPTION_HELP = (
    "Option of the merge rule of --method or --start, NAME=VALUE, such as small=mean; repeatable."
)


def merge_rule(name: str, pairs: Sequence[str]) -> tuple[MergeRule, MergeOptions]:
    """Return a rule and how it treats blocks from pairs NAME=VALUE, which may name options of either."""
    from aniso.merge import MergeOptions, new_merge_rule, parsed_options

    for pair in pairs:
        if "=" not in pair:
            raise UsageError(
                "USAGE",
                f"invalid value '{printable(pair)}' for --merge-option",
                fix="--merge-option keep=0.2",
            )
    known = {field.name for field in fields(MergeOptions)}
    split = [pair.split("=", 1) for pair in pairs]
    how = MergeOptions(**{key: value for key, value in split if key in known})
    own = [f"{key}={value}" for key, value in split if key not in known]
    return new_merge_rule(name, parsed_options(name, own)), how


def merge_settings(name: str, pairs: Sequence[str]) -> list[str]:
    """Return all options of a rule as pairs, defaults included."""
    rule, how = merge_rule(name, pairs)
    found = {**rule.options(), **asdict(how)}
    return [f"{key}={str(v).lower() if isinstance(v, bool) else v}" for key, v in found.items()]


def planned_vector(bank: Bank, rule: MergeRule, how: MergeOptions) -> TaskVector:
    """Return the vector that a rule will make, for plans: its sources are checked, nothing is merged."""
    from aniso.merge import unread_merge

    try:
        return unread_merge(
            bank, rule, qkv=how.qkv, embeddings=how.embeddings, small=how.small, space=how.space
        )
    except UsageError as e:
        raise _with_fix(e) from None


def merged_vector(
    bank: Bank,
    rule: MergeRule,
    how: MergeOptions,
    directory: Path | None = None,
    progress: ProgressCallback | None = None,
) -> TaskVector:
    """Return the vector that a rule makes of a bank.

    In a run's directory it is written once, beside the checkpoints: a resumed run reads the same numbers.
    """
    from aniso.merge import MergeKeywords, merge
    from aniso.vectors import TaskVector
    from aniso.weights.atomic import make_directory

    planned = planned_vector(bank, rule, how)
    keywords: MergeKeywords = {
        "qkv": how.qkv,
        "embeddings": how.embeddings,
        "small": how.small,
        "space": how.space,
    }
    if progress is not None:
        keywords["progress"] = _MergeProgress(progress, bank, rule, how)
    if directory is not None:
        path = directory / MERGED
        if path.exists() and (found := TaskVector.load(path)).provenance.sha256 == planned.provenance.sha256:
            return found
        make_directory(directory)
        keywords |= {"to": path, "overwrite": True}
    try:
        return merge(bank, rule, **keywords)
    except UsageError as e:
        raise _with_fix(e) from None


class _MergeProgress:
    """Progress in bytes of deltas, as merging reports it, to progress of a run."""

    def __init__(self, progress: ProgressCallback, bank: Bank, rule: MergeRule, how: MergeOptions) -> None:
        from aniso.merge import plan_merge

        self._progress = progress
        self._done = 0
        self._total = (rule.reads * len(bank) + 1) * plan_merge(bank, rule, how).written_bytes

    def __call__(self, count: int) -> None:
        self._done = min(self._total, self._done + count)
        self._progress("merging", self._done, self._total)


def _with_fix(error: UsageError) -> UsageError:
    """Return the error with the option of a run in place of that of ``aniso bank merge``."""
    error.fix = error.fix.replace("--small mean", "--merge-option small=mean")
    error.fix = error.fix.replace("--option", "--merge-option").replace("with --vectors", "of the bank")
    return error
