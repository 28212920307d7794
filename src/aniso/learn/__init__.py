"""Learning: objectives, one loop, evaluation, search, and what can be measured about the result."""

from aniso.learn._training.epoch_sampler import EpochSampler
from aniso.learn._training.interrupt import REQUESTS, Interrupt
from aniso.learn._training.loop import Row
from aniso.learn._training.tensorboard import TensorBoardWriter
from aniso.learn._training.trainable import Trainable
from aniso.learn._training.training_checkpoint import TrainingCheckpoints, differences
from aniso.learn.evaluate import Accuracy, evaluate
from aniso.learn.finetune import Tuned, finetune
from aniso.learn.fit import Fit, fit
from aniso.learn.keep import Best, Keep, Last, Lowest
from aniso.learn.language import evaluate_lm, text_dataset
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

__all__ = [
    "fit",
    "Fit",
    "Trainable",
    "Row",
    "EpochSampler",
    "TrainingCheckpoints",
    "differences",
    "Interrupt",
    "REQUESTS",
    "TensorBoardWriter",
    "Objective",
    "CrossEntropy",
    "CoefficientNorm",
    "Entropy",
    "SAR",
    "Contrastive",
    "FixMatch",
    "LanguageLoss",
    "text_dataset",
    "evaluate_lm",
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
