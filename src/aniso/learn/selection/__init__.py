"""Choosing vectors under a budget. ``bank.select(strategy)`` gives a smaller bank."""

from aniso.learn.selection.by_chance import Random
from aniso.learn.selection.by_features import FeatureSimilarity, mean_feature
from aniso.learn.selection.by_gradient import BlockwiseGradient, WholeGradient
from aniso.learn.selection.pursuit import Pursuit
from aniso.learn.selection.remembered import GradientCache
from aniso.learn.selection.strategy import Budget, Choice, Scores, Strategy

__all__ = [
    "Random",
    "FeatureSimilarity",
    "WholeGradient",
    "BlockwiseGradient",
    "Pursuit",
    "GradientCache",
    "Budget",
    "Choice",
    "Scores",
    "Strategy",
    "mean_feature",
]
