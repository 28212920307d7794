"""Heads on top of a method's result: learned on features of the shots, after the rest or together with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from aniso.data import Labelled
from aniso.learn import Best, FeatureCache, ItemFeatures, features
from aniso.learn.heads import Head, TipAdapter, new_head
from aniso.models import ClassWeights
from aniso.records import HeadSummary

if TYPE_CHECKING:
    from aniso.experiments.result import MethodResult
    from aniso.experiments.session import Session

VIEWS = 10
"""Augmented views of every shot that a head learns from."""


def check_head(session: Session) -> None:
    """Raise the error that fitting the setting's head would raise."""
    _new_head(session)


def fit_head(session: Session, result: MethodResult) -> MethodResult:
    """Learn the setting's head on features of the shots; the step is chosen as the epoch is."""
    assert session.setting.head_name is not None
    shots = session.shots
    return _fitted(
        session, result, _new_head(session), lambda model: _augmented_features(session, model, shots)
    )


def fit_logistic_regression(session: Session, result: MethodResult) -> MethodResult:
    """Learn the head ``linear`` on features of the shots as they are, as scikit-learn does by default.

    scikit-learn minimises C * sum of losses + |weights|² / 2 with C = 1: the mean loss with a decay of one
    over the number of shots.
    """
    shots = session.shots
    head = new_head("linear", class_weights(session), {"decay": 1 / len(shots)})
    return _fitted(session, result, head, lambda model: _features(session, model, shots))


def _fitted(
    session: Session, result: MethodResult, head: Head, seen: Callable[[nn.Module], Tensor]
) -> MethodResult:
    """Fit a head on what ``seen`` returns for the result's model: features of the shots."""
    model, shots = result.model_for(session.task_name), session.shots
    held_out = None
    if isinstance(session.problem.keep, Best):
        (split,) = (s for s in session.problem.keep.splits if isinstance(s, Labelled))
        held_out = (_features(session, model, split)[0], torch.tensor(split.labels))
    head = head.to(session.device)
    done = head.fit(
        seen(model),
        torch.tensor(shots.labels),
        held_out=held_out,
        progress=session.options.progress,
    )
    summary = HeadSummary(
        kind=head.kind,
        trainable=head.count,
        steps=len(done.losses),
        kept_step=done.kept,
        loss=(done.losses[0], done.losses[-1]),
    )
    return replace(result, head=head, metrics=result.metrics.model_copy(update={"head": summary}))


def joint_head(session: Session) -> Head:
    """Return a head that starts from the base's features of the shots, to be learned with coefficients."""
    shots = session.shots
    seen = _augmented_features(session, session.encoder, shots)
    head = _new_head(session)
    assert isinstance(head, TipAdapter)  # the method has checked it
    return head.remember(seen, torch.tensor(shots.labels)).to(session.device)


def _new_head(session: Session) -> Head:
    """The setting's head before it is trained."""
    setting = session.setting
    assert setting.head_name is not None
    return new_head(setting.head_name, class_weights(session), setting.head_settings)


def class_weights(session: Session) -> ClassWeights:
    """Return the base's class weights for the task that is learned."""
    return session.encoder.class_weights(session.shots.classes, progress=session.options.progress)


def feature_cache(session: Session) -> FeatureCache | ItemFeatures | None:
    """Return the cache of features, which is worth it where several heads are learned on them."""
    if session.options.features is not None:
        return session.options.features
    return FeatureCache.default() if session.setting.head_name is not None else None


def _augmented_features(session: Session, model: nn.Module, shots: Labelled) -> Tensor:
    setting = session.setting
    return _features(session, model, shots, view=setting.head_view, views=VIEWS, seed=setting.seed)


def _features(
    session: Session, model: nn.Module, split: Labelled, view: str = "eval", views: int = 1, seed: int = 0
) -> Tensor:
    found = features(
        model,
        split,
        view=view,
        views=views,
        seed=seed,
        workers=session.options.workers,
        cache=feature_cache(session),
        progress=session.options.progress,
    )
    return found.to(session.device)
