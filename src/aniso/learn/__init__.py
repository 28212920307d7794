"""Learning: fine-tuning and evaluation."""

from aniso.learn.evaluate import Accuracy, evaluate
from aniso.learn.finetune import Tuned, finetune
from aniso.learn.schedule import Schedule

__all__ = ["evaluate", "Accuracy", "finetune", "Tuned", "Schedule"]
