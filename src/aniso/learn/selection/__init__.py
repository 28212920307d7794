"""Selection rules: choose vectors, or cells of them, under a budget.

``bank.select(rule)`` gives a smaller bank. A rule is one file of this package, with a class
decorated by ``@register("name")``.
"""

from aniso.errors import UsageError
from aniso.learn.selection.adapter_scoring import AdapterScoring, ScoredAdapters, ScoredChoice
from aniso.learn.selection.block_gradient import BlockGradient
from aniso.learn.selection.features import FeatureSimilarity, mean_feature
from aniso.learn.selection.gradient import BlockwiseGradient, WholeGradient
from aniso.learn.selection.gradient_cache import GradientCache
from aniso.learn.selection.pursuit import Pursuit
from aniso.learn.selection.random import Random
from aniso.learn.selection.score_files import AdapterScores, ScoreFiles
from aniso.learn.selection.selection_rule import Choice, ChosenCells, Scores, SelectionInputs, SelectionRule
from aniso.registry import SELECTION_RULES
from aniso.sizes import Budget

register = SELECTION_RULES.register


def new_selection_rule(name: str, inputs: SelectionInputs) -> SelectionRule:
    """Return the rule that is registered as ``name``; raise UsageError if it lacks an input it needs."""
    kind: type[SelectionRule] = SELECTION_RULES.get(name)
    if kind.needs_objective and inputs.objective is None:
        raise UsageError(
            "USAGE",
            f"selection rule '{name}' needs a task to select vectors for",
            fix="--task TASK, --texts FILE for a language model, or the rule 'random'",
        )
    return kind.from_inputs(inputs)


__all__ = [
    "Random",
    "FeatureSimilarity",
    "WholeGradient",
    "BlockwiseGradient",
    "Pursuit",
    "GradientCache",
    "Budget",
    "Choice",
    "ChosenCells",
    "BlockGradient",
    "AdapterScoring",
    "AdapterScores",
    "ScoreFiles",
    "ScoredAdapters",
    "ScoredChoice",
    "Scores",
    "SelectionRule",
    "SelectionInputs",
    "new_selection_rule",
    "mean_feature",
    "register",
]
