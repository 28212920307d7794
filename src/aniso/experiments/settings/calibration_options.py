"""The options of calibration: what fits together, and the rule that they describe."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from aniso.errors import UsageError, printable
from aniso.json_value import JsonValue

if TYPE_CHECKING:
    from aniso.experiments.settings.addition import Addition
    from aniso.learn import CalibrationRule

_WITHOUT_START = ("regmean", "regmean++")
"""Rules whose result does not depend on the model that is calibrated."""


def calibration_rule(setting: Addition) -> CalibrationRule:
    """Return the rule that a setting names, with its options."""
    from aniso.learn import CALIBRATION_RULES

    assert setting.calibrate is not None
    kind = CALIBRATION_RULES[setting.calibrate]
    known = asdict(kind())
    given = {}
    for pair in setting.calibrate_options:
        key, _, text = pair.partition("=")
        if key not in known:
            raise UsageError(
                "USAGE",
                f"calibration rule '{setting.calibrate}' has no option '{printable(key)}'",
                expected=", ".join(f"{name}={value:g}" for name, value in known.items()),
                fix=f"--calibrate-option {next(iter(known))}={next(iter(known.values())):g}",
            )
        try:
            given[key] = float(text)
        except ValueError:
            raise UsageError(
                "USAGE",
                f"invalid value '{printable(text)}' for option '{key}' of calibration rule "
                f"'{setting.calibrate}'",
                expected="a number",
                fix=f"--calibrate-option {key}={known[key]:g}",
            ) from None
    return kind(**given)


def calibration_settings(setting: Addition) -> list[JsonValue]:
    """Return all options of the rule as pairs, defaults included; none without calibration."""
    if setting.calibrate is None:
        return []
    return [f"{name}={value:g}" for name, value in asdict(calibration_rule(setting)).items()]


def check_calibration(setting: Addition) -> None:
    """Raise ValueError, or a UsageError, if the options of calibration do not fit the others."""
    if setting.calibrate is None:
        if setting.calibrate_items != 64 or setting.calibrate_options:
            raise ValueError("calibrate_items and calibrate_options belong to calibrate: add it: featcal")
        return
    method = setting.method
    if not method.composes:
        raise ValueError(f"calibrate is for one composition of vectors, which '{method.name}' does not make")
    if setting.is_linearised:
        raise ValueError("calibrate changes weights, which a linearised model does not have")
    if setting.calibrate in _WITHOUT_START and method.name != "mean":
        raise ValueError(
            f"{setting.calibrate} does not depend on the merge that it starts at: method mean, or featcal"
        )
    if setting.calibrate_options:
        calibration_rule(setting)
