"""All recipes that come with aniso, by the label of their table or figure in the paper."""

from __future__ import annotations

import difflib
from functools import cache
from importlib import resources
from pathlib import Path

from aniso.errors import UsageError, printable
from aniso.experiments.paper.recipe import BANK, DataSet, Recipe, RecipeFile, parse_recipes
from aniso.experiments.strict_yaml import read_yaml


def recipe_files() -> list[Path]:
    """Return the recipe files of the package."""
    folder = Path(str(resources.files("aniso.experiments.paper"))) / "recipes"
    return sorted(folder.glob("*.yaml"))


@cache
def recipes() -> dict[str, Recipe]:
    """Return all recipes by id: tables, then figures, then banks, each in the order of the alphabet."""
    found = [recipe for path in recipe_files() for recipe in parse_recipes(read_yaml(path))]
    order = ("tab", "fig", "bank")
    found.sort(key=lambda recipe: (order.index(recipe.id.partition(":")[0]), recipe.id))
    return {recipe.id: recipe for recipe in found}


def recipe(name: str) -> Recipe:
    """Return a recipe by id; a sub-figure's label gives the figure that it is part of."""
    known = recipes()
    if name in known:
        return known[name]
    for found in known.values():
        if name in found.entry.parts:
            return found
    near = difflib.get_close_matches(name, known, 3)
    raise UsageError(
        "USAGE",
        f"the paper has no table or figure '{printable(name)}'",
        likely=f"you meant {' or '.join(near)}" if near else "",
        expected="a label of the paper, such as tab:addition or fig:few_shots",
        fix="aniso paper ls",
    )


def experiment_file(name: str) -> RecipeFile:
    """Return the file of an experiment."""
    return experiment_recipe(name).file


def experiment_recipe(name: str) -> Recipe:
    """Return one of the recipes of an experiment's file."""
    found = [recipe for recipe in recipes().values() if recipe.file.experiment == name]
    if not found:
        raise UsageError(
            "SPEC", f"no recipe file has the experiment '{printable(name)}'", fix="correct the recipe"
        )
    return found[0]


def bank_recipe(name: str) -> Recipe:
    """Return the recipe that makes a bank."""
    return recipe(f"{BANK}{name}")


def bank_names() -> tuple[str, ...]:
    """Return the names of all banks that recipes use."""
    return tuple(name.removeprefix(BANK) for name in recipes() if name.startswith(BANK))


def data_sets() -> dict[str, DataSet]:
    """Return the data sets of the paper with their sizes."""
    return {name: own for found in recipes().values() for name, own in found.file.datasets.items()}


def all_vectors() -> tuple[str, ...]:
    """Return the names of all task vectors of the paper: one per data set that is fine-tuned on."""
    return experiment_file("banks").tasks
