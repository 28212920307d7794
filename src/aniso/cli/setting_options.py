"""Options of commands that run a setting: those of the setting, its methods, the optimiser and the run."""

from __future__ import annotations

from aniso.cli.run_options import OutputOptions, RuntimeOptions
from aniso.experiments.methods import Method, TrainingMethod
from aniso.experiments.options import OptionInfo, options_of
from aniso.experiments.schedule_options import ScheduleOptions
from aniso.experiments.settings import Setting
from aniso.registry import METHODS, SETTINGS


def generated_options(name: str, method: str | None = None) -> dict[str, OptionInfo]:
    """Return the options of the command that runs a setting."""
    setting: type[Setting] = SETTINGS.get(name)
    methods = setting.methods() if method is None else (method,)
    return _options(setting, methods, fixed=len(methods) == 1)


def _options(setting: type[Setting], methods: tuple[str, ...], *, fixed: bool) -> dict[str, OptionInfo]:
    """All options by name, the setting's own before inherited ones; shared ones appear once."""
    known = options_of(setting)
    required = [name for name, info in known.items() if info.required]
    own = [name for cls in setting.__mro__ for name in vars(cls).get("__annotations__", {}) if name in known]
    found = {name: known[name] for name in dict.fromkeys([*required, *own])}
    if fixed:
        del found["method"]
    classes: list[type[Method]] = [METHODS.get(name) for name in methods]
    for cls in classes:
        found |= {name: info for name, info in cls.options_for(setting).items() if name not in found}
    if any(issubclass(cls, TrainingMethod) for cls in classes):
        found |= options_of(ScheduleOptions)
    return found | options_of(RuntimeOptions) | options_of(OutputOptions)
