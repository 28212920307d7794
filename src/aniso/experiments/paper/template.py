"""Templates of recipes made into cells: with a model, banks and tasks, in full or scaled down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from aniso.experiments.paper.catalogue import all_vectors, bank_names, experiment_recipe
from aniso.experiments.paper.recipe import OTHERS, TASKS, Recipe, RunSelection, VariantTemplate, spliced
from aniso.experiments.paper.smoke import SMOKE_MODEL, scaled, smoke_tasks
from aniso.experiments.settings import Setting
from aniso.experiments.spec import Cell, Experiment, Values, cells
from aniso.experiments.strict_yaml import Document, validated
from aniso.json_value import JsonObject
from aniso.registry import SETTINGS


@final
@dataclass(frozen=True)
class Setup:
    """What a recipe is run with."""

    backbone: str
    banks: Mapping[str, str] = field(default_factory=dict)
    """Where banks are, by name; a bank that is not in it stands under its own name."""
    smoke: bool = False
    weights: str | None = "openai"

    def base(self) -> JsonObject:
        """Return the options of the model."""
        if self.smoke:
            return {"model": SMOKE_MODEL}
        return {"model": self.backbone, **({} if self.weights is None else {"weights": self.weights})}


@final
@dataclass(frozen=True)
class RecipeCells:
    """The cells of one experiment that a recipe needs."""

    experiment: str
    cells: tuple[Cell, ...]

    @property
    def banks(self) -> tuple[str, ...]:
        """Names or places of the banks that these cells use, random ones left out."""
        return banks_of(cell.setting for cell in self.cells)


def recipe_cells(recipe: Recipe, setup: Setup) -> list[RecipeCells]:
    """Return all cells of a recipe, each checked as a setting; errors name the recipe's file and line."""
    if recipe.entry.kind not in ("runs", "bank"):
        return []
    return [_selected(recipe, selection, setup) for selection in recipe.entry.runs]


def owner(recipe: Recipe, selection: RunSelection) -> tuple[Recipe, RunSelection]:
    """Return the recipe whose file has the experiment of a selection, and the selection."""
    return experiment_recipe(selection.experiment) if selection.experiment else recipe, selection


def _selected(recipe: Recipe, selection: RunSelection, setup: Setup) -> RecipeCells:
    document = experiment_document(*owner(recipe, selection), setup)
    experiment = validated(Experiment, document)
    return RecipeCells(experiment.name, tuple(cells(experiment, document)))


def counted_settings(recipe: Recipe, setup: Setup) -> list[tuple[Setting, int]]:
    """Return the settings of a recipe with the first seed alone, each with the number of its seeds."""
    out: list[tuple[Setting, int]] = []
    for selection in recipe.entry.runs if recipe.entry.kind in ("runs", "bank") else ():
        document = experiment_document(*owner(recipe, selection), setup)
        experiment = validated(Experiment, document)
        shared = experiment.grid.get("seed", [0])
        seeds = {own.label: len(own.grid.get("seed", shared)) for own in experiment.variants}
        first = [own.model_copy(update={"grid": _first_seed(own.grid)}) for own in experiment.variants]
        small = experiment.model_copy(update={"grid": _first_seed(experiment.grid), "variants": first})
        out += [(cell.setting, seeds[cell.label]) for cell in cells(small, document)]
    return out


def _first_seed(grid: Values) -> Values:
    return {key: values[:1] if key == "seed" else values for key, values in grid.items()}


def banks_of(settings: Iterable[Setting]) -> tuple[str, ...]:
    """Return names or places of the banks that settings use, random ones left out."""
    used = {str(setting.bank) for setting in settings if setting.method.needs_bank}
    return tuple(sorted(bank for bank in used if not bank.startswith("random:")))


def experiment_document(recipe: Recipe, selection: RunSelection, setup: Setup) -> Document:
    """Return the spec of the selected runs, as ``aniso run`` would read it."""
    file = recipe.file
    assert file.spec is not None
    tasks = smoke_tasks(file.tasks) if setup.smoke else list(file.tasks)
    vectors = smoke_tasks(all_vectors()) if setup.smoke else list(all_vectors())
    places: list[int] = []
    variants: list[JsonObject] = []
    for i, variant in enumerate(file.spec.variants):
        if selection.variants and variant.label not in selection.variants:
            continue
        repeated = _repeated(variant, tasks, vectors)
        variants += repeated
        places += [i] * len(repeated)
    data: JsonObject = {
        "schema": 1,
        "name": file.experiment,
        "base": _to_the_letter({**setup.base(), **file.spec.base}),
        "grid": {**file.spec.grid, **selection.grid},
        "variants": variants,
    }
    data = spliced(data, {TASKS: tasks})
    if setup.smoke:
        data = scaled(data, tasks)
    names = {name: setup.banks.get(name, name) for name in bank_names()}
    return Document(recipe.document.label, _with_banks(data, names), _lines(recipe.document, places))


def _to_the_letter(base: JsonObject) -> JsonObject:
    """Return the options without aniso's safeguards: the paper's learning rate, and no second start."""
    if "coefficients" not in SETTINGS.get(str(base["setting"])).methods():
        return base
    schedule = base.get("schedule")
    return {**base, "limit_lr": False, "schedule": {**_options(schedule), "restarts": 0}}


def _options(value: object) -> JsonObject:
    return dict(value) if isinstance(value, dict) else {}


def _repeated(variant: VariantTemplate, tasks: Sequence[str], vectors: Sequence[str]) -> list[JsonObject]:
    """Return the variant, or one for every task with the other vectors."""
    made: JsonObject = {"label": variant.label, "base": variant.base, "grid": variant.grid}
    if variant.each is None:
        return [made]
    out: list[JsonObject] = []
    for task in tasks:
        others: list[Any] = [[name] for name in vectors if name != task]
        out.append({**made, "grid": {variant.each: [task], **spliced(variant.grid, {OTHERS: others})}})
    return out


def _with_banks(data: JsonObject, names: Mapping[str, str]) -> JsonObject:
    """Return the spec with places in place of the names of banks."""

    def placed(options: Any) -> Any:
        bank = options.get("bank")
        if isinstance(bank, list):
            return {**options, "bank": [names.get(str(name), name) for name in bank]}
        return {**options, "bank": names.get(str(bank), bank)} if bank is not None else options

    variants: Any = data["variants"]
    made = [{**v, "base": placed(v["base"]), "grid": placed(v["grid"])} for v in variants]
    return {**data, "base": placed(data["base"]), "grid": placed(data["grid"]), "variants": made}


def _lines(document: Document, places: Sequence[int]) -> dict[tuple[str | int, ...], int]:
    """Return the lines of the spec within the recipe file, with the numbers that its variants have now."""
    own = {path[1:]: line for path, line in document.lines.items() if path[:1] == ("spec",)}
    out = {path: line for path, line in own.items() if path[:1] != ("variants",)}
    for new, old in enumerate(places):
        size = 2
        found = {path[size:]: line for path, line in own.items() if path[:size] == ("variants", old)}
        out |= {("variants", new, *rest): line for rest, line in found.items()}
    return out
