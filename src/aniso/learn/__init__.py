"""Learning: objectives, one loop, evaluation, search, and what can be measured about the result."""

from aniso.learn.evaluate import Accuracy, evaluate
from aniso.learn.finetune import Tuned, finetune
from aniso.learn.fit import Fit, fit
from aniso.learn.keep import Best, Keep, Last, Lowest
from aniso.learn.language import guessed, passages
from aniso.learn.objectives import (
    SAR,
    CoefficientNorm,
    Contrastive,
    CrossEntropy,
    Entropy,
    FixMatch,
    LanguageLoss,
    Objective,
)
from aniso.learn.schedule import Schedule
from aniso.learn.search import Search, search
from aniso.learn.trained import Trained

__all__ = [
    "fit",
    "Fit",
    "Trained",
    "Objective",
    "CrossEntropy",
    "CoefficientNorm",
    "Entropy",
    "SAR",
    "Contrastive",
    "FixMatch",
    "LanguageLoss",
    "passages",
    "guessed",
    "Schedule",
    "Keep",
    "Last",
    "Best",
    "Lowest",
    "search",
    "Search",
    "evaluate",
    "Accuracy",
    "finetune",
    "Tuned",
]
