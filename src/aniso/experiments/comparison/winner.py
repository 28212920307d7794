"""The winner of a comparison as an ordinary run directory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from aniso.experiments.comparison.kept_rows import AnyCandidate
from aniso.experiments.content import Content
from aniso.experiments.record import Clock, record
from aniso.experiments.result import RunOptions, RunResult
from aniso.experiments.run_directory import RunDirectory
from aniso.experiments.run_files import COMPARISON
from aniso.experiments.session import Session
from aniso.experiments.settings import Setting
from aniso.json_value import JsonObject
from aniso.progress import ProgressCallback
from aniso.records import Record, rounded
from aniso.weights.atomic import write_text


class AnyResult(Protocol):
    """The result of a comparison of any setting."""

    @property
    def chosen(self) -> AnyCandidate: ...
    def content(self) -> JsonObject: ...


def as_run(candidate: AnyCandidate) -> Setting:
    """Return the setting of a candidate as an ordinary run, which also evaluates the base."""
    return candidate.setting.model_copy(update={"compare": True})


class AnyComparison:
    """What comparisons of all settings share: the winner is run by a session with the same model and bank."""

    _origin: Session

    def learn(self, chosen: AnyCandidate, options: RunOptions) -> RunResult:
        """Run a candidate's setting on all of its data, and evaluate it as ``aniso fit`` does."""
        session = self._origin.sibling(as_run(chosen), dict(self._origin.tasks))
        session.options = replace(options, features=self._origin.options.features)
        return session.run()

    def content(self, chosen: AnyCandidate) -> Content:
        """Return the files that this run is made from."""
        return self._origin.sibling(as_run(chosen), dict(self._origin.tasks)).content


def write_winner(
    comparison: AnyComparison,
    result: AnyResult,
    options: RunOptions,
    directory: Path,
    progress: ProgressCallback,
) -> tuple[Record, tuple[str, ...]]:
    """Run the recommended candidate on all of its data into a directory; returns its record and notes.

    The directory is that of ``aniso fit`` with the same options, and has the comparison beside. A run that
    was interrupted there is resumed; one that is done is returned, if its files have not changed.
    """
    chosen = result.chosen
    setting, run, clock = as_run(chosen), RunDirectory(directory), Clock()
    found = run.begin(setting, resume=True)
    if found is not None:
        run.require_unchanged(found, comparison.content(chosen))
        return found, ()
    options = replace(options, directory=directory, progress=progress, resume=setting.method.resumes)
    try:
        learned = comparison.learn(chosen, options)
    except BaseException as e:
        run.forget(e)
        raise
    made = record(setting, learned, clock)
    text = json.dumps(rounded(result.content()), indent=1, sort_keys=True) + "\n"
    write_text(directory / COMPARISON, text, overwrite=True)
    return run.finish(made, learned), learned.notes
