"""What is the same for all settings: learning by gradients, or by losses alone, as a setting says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from aniso.compose import Coefficients, Composition, FactorComposition
from aniso.errors import UsageError, printable
from aniso.experiments.outcome import RunOptions
from aniso.experiments.settings import BaseSetting
from aniso.experiments.settings.setting import Adapts
from aniso.learn import Fit, Keep, Objective, Trainable, fit
from aniso.learn.gradient_free import evolve
from aniso.learn.selection import Choice
from aniso.vectors import Bank


def device_of(how: RunOptions) -> torch.device:
    """What was asked for; else the graphics card, if there is one."""
    said = how.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=said).device
    except (RuntimeError, AssertionError) as e:
        raise UsageError(
            "USAGE",
            f"there is no device '{printable(said)}'",
            reason=str(e).splitlines()[0][:200],
            fix="--device cpu",
        ) from None


def learned(
    trained: Trainable, objective: Objective, keep: Keep, setting: BaseSetting, how: RunOptions
) -> tuple[Fit, dict[str, Any]]:
    """By gradients; with what a record says of it."""
    done = fit(
        trained,
        objective,
        setting.resolved_schedule(),
        keep=keep,
        seed=setting.seed,
        directory=how.directory,
        resume=how.resume,
        allow_env_change=how.allow_env_change,
        workers=how.workers,
        online=setting.is_online,
        progress=how.progress,
        epoch_done=how.epoch_done,
    )
    history = [row.content() for row in done.history]
    facts = {"kept_epoch": done.kept, "epochs": len(history) - 1, "history": history}
    return done, {**facts, "trainable": trained.count}


def composed(
    model: nn.Module, bank: Bank, setting: BaseSetting, how: RunOptions
) -> tuple[Composition, FactorComposition | None]:
    """What is learned: a composition of whole updates, or of adapters' factors, which becomes an adapter."""
    if setting.composes_factors:
        factors = FactorComposition.of(model, bank, runtime=how.runtime)
        return factors.composition, factors
    return Composition(model, bank, setting.resolved_partition(), runtime=how.runtime), None


def with_choice(coefficients: Coefficients | None, choice: Choice | None) -> Coefficients | None:
    """Coefficients that say how their vectors were chosen."""
    if coefficients is None or choice is None:
        return coefficients
    return replace(coefficients, selection=choice.words)


def evolved(
    made: Composition, objective: Objective, keep: Keep, setting: Adapts, how: RunOptions
) -> dict[str, Any]:
    """From losses alone; what a record says of it."""
    done = evolve(
        made,
        objective,
        evaluations=setting.evaluations,
        parallel=setting.parallel,
        keep=keep,
        seed=setting.seed,
        workers=how.workers,
        progress=how.progress,
        look_done=how.epoch_done,
    )
    history = [row.content() for row in done.history]
    facts = {"kept_look": done.kept, "evaluations": history[-1]["evaluations"], "history": history}
    return {**facts, "trainable": made.values.numel()}
