"""aniso composes fine-tuned models: one learned coefficient per task vector and parameter block."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aniso.compose import Coefficients as Coefficients
    from aniso.compose import Composition as Composition
    from aniso.compose import Linearised as Linearised
    from aniso.compose import Partition as Partition
    from aniso.compose import Plan as Plan
    from aniso.compose import Runtime as Runtime
    from aniso.data import ClassList as ClassList
    from aniso.data import Labelled as Labelled
    from aniso.data import Task as Task
    from aniso.data import Unlabelled as Unlabelled
    from aniso.data import load_task as load_task
    from aniso.data import read_examples as read_examples
    from aniso.errors import AnisoError as AnisoError
    from aniso.learn import Best as Best
    from aniso.learn import CoefficientNorm as CoefficientNorm
    from aniso.learn import CrossEntropy as CrossEntropy
    from aniso.learn import LanguageLoss as LanguageLoss
    from aniso.learn import Last as Last
    from aniso.learn import Lowest as Lowest
    from aniso.learn import Schedule as Schedule
    from aniso.learn import evaluate as evaluate
    from aniso.learn import finetune as finetune
    from aniso.learn import fit as fit
    from aniso.learn import guessed as guessed
    from aniso.learn import passages as passages
    from aniso.learn import search as search
    from aniso.learn import selection as selection
    from aniso.learn.features import features as features
    from aniso.learn.heads import LPP as LPP
    from aniso.learn.heads import LinearProbe as LinearProbe
    from aniso.learn.heads import TipAdapter as TipAdapter
    from aniso.learn.heads import load_head as load_head
    from aniso.models import Encoder as Encoder
    from aniso.models import LanguageModel as LanguageModel
    from aniso.models import load_language_model as load_language_model
    from aniso.models import load_model as load_model
    from aniso.vectors import Bank as Bank
    from aniso.vectors import Block as Block
    from aniso.vectors import BlockSource as BlockSource
    from aniso.vectors import Layout as Layout
    from aniso.vectors import Storage as Storage
    from aniso.vectors import TaskVector as TaskVector
    from aniso.vectors import random_bases as random_bases
    from aniso.weights import open_weights as open_weights

__version__ = "0.1.0.dev0"

# Found when first used: importing aniso must not cost the seconds that torch takes.
_HOMES = {
    "open_weights": "aniso.weights",
    "TaskVector": "aniso.vectors",
    "Bank": "aniso.vectors",
    "Layout": "aniso.vectors",
    "Block": "aniso.vectors",
    "BlockSource": "aniso.vectors",
    "Storage": "aniso.vectors",
    "random_bases": "aniso.vectors",
    "Composition": "aniso.compose",
    "Partition": "aniso.compose",
    "Coefficients": "aniso.compose",
    "Linearised": "aniso.compose",
    "Runtime": "aniso.compose",
    "Plan": "aniso.compose",
    "load_model": "aniso.models",
    "Encoder": "aniso.models",
    "load_language_model": "aniso.models",
    "LanguageModel": "aniso.models",
    "load_task": "aniso.data",
    "Task": "aniso.data",
    "ClassList": "aniso.data",
    "Labelled": "aniso.data",
    "Unlabelled": "aniso.data",
    "read_examples": "aniso.data",
    "fit": "aniso.learn",
    "CrossEntropy": "aniso.learn",
    "CoefficientNorm": "aniso.learn",
    "Last": "aniso.learn",
    "Best": "aniso.learn",
    "Lowest": "aniso.learn",
    "LanguageLoss": "aniso.learn",
    "passages": "aniso.learn",
    "guessed": "aniso.learn",
    "search": "aniso.learn",
    "evaluate": "aniso.learn",
    "finetune": "aniso.learn",
    "Schedule": "aniso.learn",
    "features": "aniso.learn.features",
    "TipAdapter": "aniso.learn.heads",
    "LPP": "aniso.learn.heads",
    "LinearProbe": "aniso.learn.heads",
    "load_head": "aniso.learn.heads",
    "AnisoError": "aniso.errors",
}
_MODULES = {"selection": "aniso.learn.selection"}
__all__ = [*_HOMES, *_MODULES, "__version__"]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'aniso' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
