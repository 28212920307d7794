"""The directory of one run: its spec, its states on the way, and what came out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, final

from aniso.errors import InputError, UsageError, printable
from aniso.experiments.outcome import Outcome
from aniso.experiments.record import write
from aniso.experiments.settings import BaseSetting
from aniso.experiments.strict_yaml import as_yaml, read_yaml
from aniso.learn.fit import METRICS
from aniso.learn.state import States, differences
from aniso.weights import save_safetensors
from aniso.weights.atomic import disk, make_directory, require_space, write_text

SPEC, RECORD, COEFFICIENTS, WEIGHTS, HEAD, ADAPTER = (
    "spec.yaml",
    "record.json",
    "coefficients.safetensors",
    "weights.safetensors",
    "head.safetensors",
    "adapter",
)
TENSORBOARD = "tensorboard"
_UNTRAINED = "state-00000-000000.safetensors"
_OURS = re.compile(
    rf"{re.escape(SPEC)}|{re.escape(RECORD)}|{re.escape(COEFFICIENTS)}|{re.escape(WEIGHTS)}|"
    rf"{re.escape(HEAD)}|{re.escape(METRICS)}|failure\.json|{ADAPTER}|{TENSORBOARD}|state-\d+-\d+\.safetensors|\..*\.partial-.*"
)


@final
class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._fresh = False

    @staticmethod
    def expected(setting: BaseSetting) -> list[str]:
        """What a run leaves behind."""
        result = {
            "coefficients": [METRICS, COEFFICIENTS],
            "search": [COEFFICIENTS],
            "gradient-free": [COEFFICIENTS],
            "weights": [METRICS, WEIGHTS],
        }
        if setting.trains_norms:
            result["coefficients"] = [METRICS, WEIGHTS]
        if setting.composes_factors:
            result["coefficients"] = [METRICS, ADAPTER]
        if setting.rank is not None:
            result["weights"] = [METRICS, ADAPTER]
        head = [HEAD] if setting.head_kind is not None else []
        return [SPEC, *result.get(setting.method, []), *head, RECORD]

    def begin(self, setting: BaseSetting, *, resume: bool) -> dict[str, Any] | None:
        """Make the directory; if the run is done already, its record."""
        self.require_usable(setting, resume=resume)
        done = self.path / RECORD
        if resume and done.exists():
            found = self._record(done)
            self._remove_states()  # it was killed before it could
            return found
        make_directory(self.path)
        self._fresh = not any(self.path.iterdir())
        write_text(self.path / SPEC, as_yaml(setting.spec()), overwrite=True)
        return None

    def require_usable(self, setting: BaseSetting, *, resume: bool) -> None:
        """What would fail after an hour fails now."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError("OUT-EXISTS", f"'{printable(self.path)}' is a file", fix="name a directory")
        require_space(self.path, 1 << 20)
        there = sorted(p.name for p in self.path.iterdir()) if self.path.is_dir() else []
        foreign = [name for name in there if not _OURS.fullmatch(name)]
        if foreign or (there and not resume):
            raise UsageError(
                "OUT-EXISTS",
                f"'{printable(self.path)}' holds {'other files' if foreign else 'a run already'}",
                found=printable(", ".join((foreign or there)[:6])),
                fix="name a new directory" if foreign else "add --resume to go on with it, or name another",
            )
        if resume and there:
            self._require_same(setting)

    def forget(self, failure: BaseException) -> None:
        """Leave nothing of a run that failed before there was anything to go on from.

        A state from before the first step is nothing if the input has to be mended, or other options given.
        """
        unused = {SPEC, METRICS, _UNTRAINED} if isinstance(failure, InputError) else {SPEC}
        if self._fresh and {p.name for p in self.path.iterdir()} <= unused:
            disk.remove(self.path)

    def _require_same(self, setting: BaseSetting) -> None:
        if not (self.path / SPEC).exists():
            return
        was = read_yaml(self.path / SPEC).data
        other = differences(was, json.loads(json.dumps(setting.spec())))  # as plain data, too
        if other:
            raise InputError(
                "RUN-CHANGED",
                f"the run in '{printable(self.path)}' was begun with other settings",
                changed=other[:12],
                fix="use the same options, or start a new run in another directory",
            )

    def _record(self, path: Path) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError) as e:
            raise InputError(
                "RECORD", f"'{printable(path)}' cannot be read", reason=str(e), fix="remove it and resume"
            ) from None
        return found

    def finish(self, made: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
        """Write what came out, the record last; states are not needed any more."""
        if outcome.coefficients is not None:
            outcome.coefficients.save(self.path / COEFFICIENTS, overwrite=True)
        if outcome.weights is not None:
            tensors = {name: outcome.weights.read(name) for name in outcome.weights.tensors}
            save_safetensors(self.path / WEIGHTS, tensors, overwrite=True)
        if outcome.head is not None:
            outcome.head.save(self.path / HEAD, outcome.head_of, overwrite=True)
        if outcome.adapter is not None:
            outcome.adapter.save(self.path / ADAPTER, overwrite=True)
        write(self.path / RECORD, made, overwrite=True)
        self._remove_states()
        return made

    def _remove_states(self) -> None:
        for state in States(self.path).files():
            disk.remove(state)

    def outputs(self) -> list[str]:
        names = (COEFFICIENTS, WEIGHTS, HEAD, ADAPTER, RECORD, METRICS, SPEC)
        return [name for name in names if (self.path / name).exists()]
