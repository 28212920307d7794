"""The settings: each says what is learned from, what is chosen by, and what is measured."""

from aniso.experiments.settings.addition import Addition
from aniso.experiments.settings.few_shot import FewShot
from aniso.experiments.settings.finetune import FineTune
from aniso.experiments.settings.language import Language
from aniso.experiments.settings.negation import Negation
from aniso.experiments.settings.peft import Peft
from aniso.experiments.settings.setting import BaseSetting, Job, PictureSetting
from aniso.experiments.settings.test_time import TestTime

SETTINGS: dict[str, type[BaseSetting]] = {
    "few-shot": FewShot,
    "addition": Addition,
    "negation": Negation,
    "peft": Peft,
    "finetune": FineTune,
    "test-time": TestTime,
    "lm": Language,
}
"""By the name that specs call them."""

__all__ = [
    "SETTINGS",
    "FewShot",
    "Addition",
    "Negation",
    "Peft",
    "FineTune",
    "TestTime",
    "Language",
    "BaseSetting",
    "PictureSetting",
    "Job",
]
