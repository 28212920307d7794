"""The paper's recipes in Python: the same settings, defaults and schedules that commands and specs use.

>>> import aniso
>>> aniso.recipes.schedule("few-shot").lr
0.1
>>> setting = aniso.recipes.setting("few-shot", model="mini", bank="mini", task="photos", shots=4)
>>> result = aniso.recipes.run(setting)                                              # doctest: +SKIP
>>> result.metrics.accuracy["photos"].accuracy                                       # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aniso.errors import UsageError
from aniso.experiments.methods import TrainingMethod
from aniso.experiments.parsing import parse_setting
from aniso.experiments.settings import Setting
from aniso.experiments.strict_yaml import Document
from aniso.registry import SETTINGS
from aniso.schedule import Schedule

if TYPE_CHECKING:
    from aniso.experiments.result import RunOptions, RunResult
    from aniso.json_value import JsonValue


def setting(name: str, **options: JsonValue) -> Setting:
    """Return a setting with the given options, checked; options that are not given have their defaults.

    Options are those of ``aniso fit NAME --help`` with underscores, the optimiser's in a mapping
    ``schedule``; ``method`` is a name.
    """
    return parse_setting(Document(f"recipes.setting({name!r})", {"setting": name, **options}, {}))


def schedule(name: str, **options: JsonValue) -> Schedule:
    """Return the schedule that a setting trains with: the paper's, unless an option says otherwise."""
    SETTINGS.require(name)
    needed = {key: "any" for key, field in SETTINGS.get(name).model_fields.items() if field.is_required()}
    made = setting(name, **{**_listed(needed), "bank": "any", **_one_task(name, options)})
    if not isinstance(made.method, TrainingMethod):
        raise UsageError("USAGE", f"method '{made.method.name}' has no schedule", fix="method='coefficients'")
    return made.method.resolved_schedule(made)


def run(setting: Setting, options: RunOptions | None = None) -> RunResult:
    """Run a setting: load its model, data and bank, apply its method, evaluate."""
    from aniso.experiments.session import Session

    return Session(setting, options).run()


def _listed(needed: dict[str, str]) -> dict[str, JsonValue]:
    return {key: [value] if key == "tasks" else value for key, value in needed.items()}


def _one_task(name: str, options: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """A test-time run needs a task or images, though neither is required alone."""
    known = SETTINGS.get(name).model_fields
    missing = "task" in known and not {"task", "images"} & options.keys()
    return {"task": "any", **options} if missing else options
