"""A recipe: one table or figure of the paper with its runs, its published numbers and its figures.

A recipe file holds the template of one experiment, in the form of a spec of ``aniso run`` without a model,
and an entry for every table and figure that shows its runs. In templates ``$tasks`` stands for the file's
tasks, ``$others`` for each single vector beside the own one of a variant that is repeated for ``each`` task,
and the value of ``bank`` is the name of a bank recipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, final, get_args

from pydantic import Field, JsonValue, model_validator

from aniso.experiments.options import Options
from aniso.experiments.strict_yaml import Document, validated
from aniso.published import PublishedTable, Value

Backbone = Literal["ViT-B-32", "ViT-B-16", "ViT-L-14", "RN50", "RN101"]
BACKBONES: tuple[str, ...] = get_args(Backbone)
Kind = Literal["runs", "bank", "analysis", "values", "drawing"]
"""What an entry consists of: runs of a grid, fine-tuning runs that make a bank, an analysis without runs,
values that settings hold as defaults, or a drawing."""
Analysis = Literal["disentanglement", "significance", "distributions"]
FigureName = Literal[
    "coefficient-heatmap",
    "coefficient-boxes-kind",
    "coefficient-boxes-depth",
    "few-shot-curves",
    "venn",
    "out-of-domain-bars",
    "budget-curves",
    "data-share-curves",
    "random-bases",
    "validation-share-curves",
]
Template = dict[str, JsonValue]
TASKS, OTHERS = "$tasks", "$others"
BANK = "bank:"
"""Ids of banks begin with it."""


class VariantTemplate(Options):
    """A variant of an experiment; with ``each`` it is repeated for every task."""

    label: str
    base: Template = Field(default_factory=dict)
    grid: Template = Field(default_factory=dict)
    each: Literal["task"] | None = None


class SpecTemplate(Options):
    """A spec without a model."""

    base: Template
    grid: Template = Field(default_factory=dict)
    variants: tuple[VariantTemplate, ...]


class RunSelection(Options):
    """Runs of an experiment that an entry shows: all, or some labels, or other values of the grid."""

    experiment: str = ""
    """Default: the experiment of the same file."""
    variants: tuple[str, ...] = ()
    grid: Template = Field(default_factory=dict)


class FigureUse(Options):
    """A figure, and the records that it is drawn from."""

    figure: FigureName
    part: str = ""
    """The label of a sub-figure."""
    variants: tuple[str, ...] = ()
    where: dict[str, Value] = Field(default_factory=dict)
    """Options that the runs of this figure have, such as ``target: cars``."""


class HyperParameters(Options):
    """Values of a schedule that the paper printed by task, and the setting that has them as defaults."""

    name: str
    setting: str
    over: str
    """The option of the setting that names the task."""
    options: dict[str, str] = Field(default_factory=dict)
    published: dict[str, float]


class DataSet(Options):
    """Classes and images of a data set, as the paper counts them."""

    classes: int
    train: int
    val: int
    test: int


class Entry(Options):
    """One table or figure."""

    id: str = Field(pattern=r"^(tab|fig|bank):[\w-]+$")
    title: str
    kind: Kind = "runs"
    parts: tuple[str, ...] = ()
    """Labels of sub-figures."""
    backbones: tuple[Backbone, ...] = ()
    runs: tuple[RunSelection, ...] = (RunSelection(),)
    analysis: Analysis | None = None
    figures: tuple[FigureUse, ...] = ()
    values: tuple[HyperParameters, ...] = ()
    published: tuple[PublishedTable, ...] = ()
    doubts: tuple[str, ...] = ()
    """Why a published number may not be what was measured."""
    missing: tuple[str, ...] = ()
    """Parts of the table or figure that aniso cannot produce."""
    differs: tuple[str, ...] = ()
    """Where aniso does something else than the paper."""
    assumed: tuple[str, ...] = ()
    """What the paper does not say."""

    @model_validator(mode="after")
    def _is_complete(self) -> Entry:
        if self.runnable and not self.backbones:
            raise ValueError(f"{self.id} has no backbones")
        if self.kind == "analysis" and self.analysis is None:
            raise ValueError(f"{self.id} has no analysis")
        if other := {table.backbone for table in self.published} - {*self.backbones}:
            raise ValueError(f"{self.id} has numbers of {sorted(other)[0]}, which is not among its backbones")
        return self

    @property
    def runnable(self) -> bool:
        """True if there is something to run."""
        return self.kind in ("runs", "bank", "analysis")

    @property
    def file_name(self) -> str:
        """The id as the name of a file."""
        return self.id.replace(":", "-")


class RecipeFile(Options):
    """The content of a recipe file."""

    version: Literal[1] = Field(alias="schema")
    experiment: str = Field(pattern=r"^[a-z0-9-]+$")
    tasks: tuple[str, ...]
    vectors: Literal["tasks", "all"] = "all"
    """Vectors that its banks need: those of its tasks, or of all data sets."""
    datasets: dict[str, DataSet] = Field(default_factory=dict)
    spec: SpecTemplate | None = None
    entries: tuple[Entry, ...]

    @model_validator(mode="after")
    def _has_runs(self) -> RecipeFile:
        # not as limits of the fields: pydantic would report them in place of an item's own mistake
        if not self.tasks or not self.entries:
            raise ValueError("a recipe file needs tasks and entries")
        labels = {variant.label for variant in self.spec.variants} if self.spec else set[str]()
        for entry in self.entries:
            own = [run for run in entry.runs if not run.experiment]
            wanted = {label for run in own for label in run.variants}
            if entry.kind in ("runs", "bank") and own and self.spec is None:
                raise ValueError(f"{entry.id} needs runs, and there is no spec")
            if entry.kind in ("runs", "bank") and (unknown := wanted - labels):
                raise ValueError(f"{entry.id} names the variant '{sorted(unknown)[0]}', which the spec lacks")
        return self


@final
@dataclass(frozen=True)
class Recipe:
    """An entry with the file that it stands in."""

    entry: Entry
    file: RecipeFile
    document: Document

    @property
    def id(self) -> str:
        return self.entry.id

    @property
    def bank_name(self) -> str:
        """The name of the bank that a bank recipe makes."""
        return self.id.removeprefix(BANK)


def parse_recipes(document: Document) -> list[Recipe]:
    """Return the recipes of a file; errors name the file, the line and the key."""
    tasks = document.data.get("tasks")
    entries = document.data.get("entries")
    data = dict(document.data)
    if isinstance(tasks, list) and isinstance(entries, list):
        data["entries"] = spliced(entries, {TASKS: tasks})
    found = validated(RecipeFile, Document(document.label, data, document.lines))
    return [Recipe(entry, found, document) for entry in found.entries]


def spliced(value: Any, names: dict[str, list[Any]]) -> Any:
    """Return a value in which ``$tasks`` is replaced: alone by the list, in a list by its items."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, dict):
        return {key: spliced(item, names) for key, item in value.items()}
    if isinstance(value, list):
        out: list[Any] = []
        for item in value:
            known = isinstance(item, str) and item in names
            out += names[item] if known else [spliced(item, names)]
        return out
    return value
