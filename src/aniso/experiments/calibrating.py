"""Calibration within a run: the method's composition becomes one vector, which is what is evaluated."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from aniso.compose import Partition
from aniso.experiments.result import MethodResult
from aniso.experiments.run_files import MERGED
from aniso.experiments.settings.calibration_options import calibration_rule
from aniso.learn.feature_calibration import calibrate_features
from aniso.vectors import Bank
from aniso.weights.atomic import make_directory

if TYPE_CHECKING:
    from aniso.experiments.session import Session
    from aniso.experiments.settings.addition import Addition


def calibrated(session: Session, setting: Addition, result: MethodResult) -> MethodResult:
    """Return a result whose model is the calibrated one: the base plus one vector at coefficient 1.

    In a run's directory the vector is written beside the coefficients, where merged vectors are.
    """
    splits, options = session.problem.calibration, session.options
    rule = calibration_rule(setting)
    session.whole_bank.require_new([rule.name])
    made = calibrate_features(
        result.model_for(""),
        {name: session.teacher(name) for name in splits},
        splits,
        rule,
        items=setting.calibrate_items,
        seed=setting.seed,
        workers=options.workers,
        progress=options.progress,
    )
    if options.directory is not None:
        make_directory(options.directory)
        made.vector.save(options.directory / MERGED, overwrite=True)
    composition = session.compose(Bank({made.vector.name: made.vector}), Partition.whole())
    composition.values.data.fill_(1.0)
    return replace(
        result, model_for=lambda task: composition, coefficients=composition.coefficients, calibrated=made
    )
