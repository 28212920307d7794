"""aniso composes fine-tuned models: one learned coefficient per task vector and parameter block.

Objectives, heads, selection rules, keep rules, merge rules, starts and the paper's recipes have namespaces of
their own: ``aniso.objectives``, ``aniso.heads``, ``aniso.selection``, ``aniso.keep``, ``aniso.merge``,
``aniso.starts`` and ``aniso.recipes``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aniso import merge as merge
    from aniso.compose import Coefficients as Coefficients
    from aniso.compose import Composition as Composition
    from aniso.compose import Linearised as Linearised
    from aniso.compose import Partition as Partition
    from aniso.compose import Runtime as Runtime
    from aniso.data import ClassList as ClassList
    from aniso.data import Labelled as Labelled
    from aniso.data import Task as Task
    from aniso.data import Unlabelled as Unlabelled
    from aniso.data import list_tasks as list_tasks
    from aniso.data import load_task as load_task
    from aniso.data import read_examples as read_examples
    from aniso.errors import AnisoError as AnisoError
    from aniso.experiments import recipes as recipes
    from aniso.learn import CrossEntropy as CrossEntropy
    from aniso.learn import Schedule as Schedule
    from aniso.learn import evaluate as evaluate
    from aniso.learn import evaluate_lm as evaluate_lm
    from aniso.learn import features as features
    from aniso.learn import finetune as finetune
    from aniso.learn import fit as fit
    from aniso.learn import heads as heads
    from aniso.learn import keep as keep
    from aniso.learn import objectives as objectives
    from aniso.learn import search as search
    from aniso.learn import selection as selection
    from aniso.learn import starts as starts
    from aniso.learn import text_dataset as text_dataset
    from aniso.models import Encoder as Encoder
    from aniso.models import LanguageModel as LanguageModel
    from aniso.models import list_models as list_models
    from aniso.models import load_language_model as load_language_model
    from aniso.models import load_model as load_model
    from aniso.progress import set_progress as set_progress
    from aniso.vectors import Bank as Bank
    from aniso.vectors import Block as Block
    from aniso.vectors import Layout as Layout
    from aniso.vectors import Storage as Storage
    from aniso.vectors import TaskVector as TaskVector
    from aniso.vectors import list_banks as list_banks
    from aniso.vectors import random_bases as random_bases
    from aniso.weights import open_weights as open_weights

__version__ = "0.1.0.dev0"

# Imported when first used: importing aniso must not cost the seconds that torch takes.
_HOMES = {
    "open_weights": "aniso.weights",
    "TaskVector": "aniso.vectors",
    "Bank": "aniso.vectors",
    "Layout": "aniso.vectors",
    "Block": "aniso.vectors",
    "Storage": "aniso.vectors",
    "list_banks": "aniso.vectors",
    "random_bases": "aniso.vectors",
    "Composition": "aniso.compose",
    "Partition": "aniso.compose",
    "Coefficients": "aniso.compose",
    "Linearised": "aniso.compose",
    "Runtime": "aniso.compose",
    "load_model": "aniso.models",
    "list_models": "aniso.models",
    "Encoder": "aniso.models",
    "load_language_model": "aniso.models",
    "LanguageModel": "aniso.models",
    "load_task": "aniso.data",
    "list_tasks": "aniso.data",
    "Task": "aniso.data",
    "ClassList": "aniso.data",
    "Labelled": "aniso.data",
    "Unlabelled": "aniso.data",
    "read_examples": "aniso.data",
    "fit": "aniso.learn",
    "evaluate": "aniso.learn",
    "finetune": "aniso.learn",
    "search": "aniso.learn",
    "Schedule": "aniso.learn",
    "CrossEntropy": "aniso.learn",
    "features": "aniso.learn",
    "text_dataset": "aniso.learn",
    "evaluate_lm": "aniso.learn",
    "set_progress": "aniso.progress",
    "AnisoError": "aniso.errors",
}
_MODULES = {
    "objectives": "aniso.learn.objectives",
    "heads": "aniso.learn.heads",
    "selection": "aniso.learn.selection",
    "keep": "aniso.learn.keep",
    "merge": "aniso.merge",
    "starts": "aniso.learn.starts",
    "recipes": "aniso.experiments.recipes",
}
__all__ = [*_HOMES, *_MODULES, "__version__"]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'aniso' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
