"""Learn coefficients: objectives, one training loop, evaluation, search, selection, heads and analysis."""

from aniso.learn import heads, keep, objectives, selection, starts
from aniso.learn._training.checkpointed_run import METRICS
from aniso.learn._training.epoch_sampler import EpochSampler
from aniso.learn._training.interrupt import REQUESTS, Interrupt
from aniso.learn._training.trainable import Trainable
from aniso.learn._training.training_checkpoint import TrainingCheckpoints, differences
from aniso.learn.calibration import Calibration, calibrate, fit_temperature
from aniso.learn.calibration_rules import (
    CALIBRATION_RULES,
    CalibrationRule,
    FeatCal,
    RegMean,
    RegMeanPlusPlus,
)
from aniso.learn.evaluate import Accuracy, accuracy, classify, evaluate, iterate_logits, predict, wilson
from aniso.learn.feature_calibration import CalibratedModel, calibrate_features, calibration_items
from aniso.learn.features import (
    FeatureCache,
    ItemFeatures,
    ViewRequest,
    composed_identity,
    feature_identity,
    features,
)
from aniso.learn.finetune import PAPER, Tuned, finetune, tuned_weights
from aniso.learn.fit import Fit, fit
from aniso.learn.gradient_free import evolve
from aniso.learn.item_predictions import ItemClassifier
from aniso.learn.keep import Agreement, Best, Keep, Last, Lowest
from aniso.learn.language import LanguageScore, evaluate_lm, text_dataset
from aniso.learn.lora import Adapter, Layers, adapter
from aniso.learn.objectives import (
    SAR,
    CoefficientNorm,
    Contrastive,
    CosinePairs,
    CrossEntropy,
    Distil,
    Entropy,
    FixMatch,
    LanguageLoss,
    Objective,
    StayNear,
    Teacher,
)
from aniso.learn.predictions import Predictions, predict_unlabelled
from aniso.learn.rate_limit import LR_LIMIT, limit_learning_rate, relative_norm
from aniso.learn.rounds import rounds_of
from aniso.learn.search import POINTS, Search, search
from aniso.learn.selection import GradientCache
from aniso.learn.starts import Start
from aniso.learn.tracking import Tracker
from aniso.records import EpochRow
from aniso.schedule import LrSchedule, Optimiser, Precision, Schedule

__all__ = [
    "fit",
    "Fit",
    "Start",
    "rounds_of",
    "Trainable",
    "EpochRow",
    "Schedule",
    "LrSchedule",
    "Precision",
    "Optimiser",
    "Keep",
    "Last",
    "Best",
    "Lowest",
    "Agreement",
    "Objective",
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
    "evaluate",
    "predict",
    "classify",
    "iterate_logits",
    "calibrate",
    "Calibration",
    "fit_temperature",
    "calibrate_features",
    "calibration_items",
    "CalibratedModel",
    "CalibrationRule",
    "CALIBRATION_RULES",
    "FeatCal",
    "RegMean",
    "RegMeanPlusPlus",
    "ItemClassifier",
    "accuracy",
    "Accuracy",
    "wilson",
    "predict_unlabelled",
    "Predictions",
    "features",
    "FeatureCache",
    "ItemFeatures",
    "ViewRequest",
    "feature_identity",
    "composed_identity",
    "text_dataset",
    "evaluate_lm",
    "LanguageScore",
    "search",
    "Search",
    "POINTS",
    "evolve",
    "limit_learning_rate",
    "relative_norm",
    "LR_LIMIT",
    "finetune",
    "Tuned",
    "tuned_weights",
    "PAPER",
    "adapter",
    "Adapter",
    "Layers",
    "GradientCache",
    "EpochSampler",
    "TrainingCheckpoints",
    "METRICS",
    "differences",
    "Interrupt",
    "REQUESTS",
    "Tracker",
    "heads",
    "keep",
    "objectives",
    "selection",
    "starts",
]
