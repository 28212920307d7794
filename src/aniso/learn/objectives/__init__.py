"""Losses bound to what they are measured on, and signed sums of them."""

from aniso.learn.objectives.coefficient_norm import CoefficientNorm
from aniso.learn.objectives.cross_entropy import CrossEntropy
from aniso.learn.objectives.language_loss import LanguageLoss
from aniso.learn.objectives.objective import DataTerm, Objective, Seen, Term, ValueTerm, answered
from aniso.learn.objectives.unlabelled import SAR, Contrastive, Entropy, FixMatch

__all__ = [
    "Objective",
    "Term",
    "DataTerm",
    "ValueTerm",
    "Seen",
    "answered",
    "CrossEntropy",
    "LanguageLoss",
    "CoefficientNorm",
    "Entropy",
    "SAR",
    "Contrastive",
    "FixMatch",
]
