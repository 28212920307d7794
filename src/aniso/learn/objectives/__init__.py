"""Objectives: losses bound to the split they are measured on, and signed sums of them.

An objective is one file of this package, with a class decorated by ``@register("name")``.
"""

from aniso.learn.objectives.coefficient_norm import CoefficientNorm
from aniso.learn.objectives.companion import Companion, Losses, RunContext
from aniso.learn.objectives.contrastive import Contrastive
from aniso.learn.objectives.cosine_pairs import CosinePairs
from aniso.learn.objectives.cross_entropy import CrossEntropy
from aniso.learn.objectives.distil import Distil
from aniso.learn.objectives.entropy import Entropy
from aniso.learn.objectives.fixmatch import FixMatch
from aniso.learn.objectives.language_loss import LanguageLoss
from aniso.learn.objectives.objective import DataTerm, Objective, Term, ValueTerm
from aniso.learn.objectives.sar import SAR
from aniso.learn.objectives.stay_near import StayNear
from aniso.learn.objectives.term_inputs import TermInputs, logits_of
from aniso.learn.objectives.unlabelled_term import UnlabelledTerm
from aniso.learn.teacher import Teacher
from aniso.registry import OBJECTIVES

register = OBJECTIVES.register

__all__ = [
    "Objective",
    "Term",
    "DataTerm",
    "UnlabelledTerm",
    "ValueTerm",
    "TermInputs",
    "logits_of",
    "Companion",
    "RunContext",
    "Losses",
    "CrossEntropy",
    "CosinePairs",
    "LanguageLoss",
    "CoefficientNorm",
    "StayNear",
    "Entropy",
    "SAR",
    "Contrastive",
    "FixMatch",
    "Distil",
    "Teacher",
    "register",
]
