"""``aniso fit``, ``aniso search`` and ``aniso finetune``: commands generated from the settings' options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, final

import typer
from typer.core import TyperCommand, TyperGroup

from aniso.cli.setting_options import generated_options
from aniso.experiments.methods import TrainingMethod
from aniso.experiments.options import GROUPS, OptionInfo
from aniso.experiments.settings import Setting
from aniso.registry import METHODS, SETTINGS

FINETUNE = "finetune"
_SEARCH = "search"
_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


class FitGroup(TyperGroup):
    """A command for every setting, made when it is asked for."""

    method: str | None = None
    """Fixes the method."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = [name for name in SETTINGS.names if name != FINETUNE]
        if self.method is None:
            return names
        return [name for name in names if self.method in SETTINGS.get(name).methods()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        name = SETTINGS.canonical(cmd_name)
        if name not in self.list_commands(ctx):
            return None
        if name != cmd_name:
            from aniso.cli import show

            show.notes([SETTINGS.alias_note(cmd_name)])
        return setting_command(name, self.method)


@final
class SearchGroup(FitGroup):
    """A command for every setting that a scale can be searched for."""

    method = _SEARCH


class RootGroup(TyperGroup):
    """All commands; ``finetune``, which is generated, is made when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), FINETUNE]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return setting_command(FINETUNE) if cmd_name == FINETUNE else super().get_command(ctx, cmd_name)


class _GroupedHelp(TyperCommand):
    """A command whose help shows options in groups."""

    groups: Mapping[str, str]
    """The group of every option, by name."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is not None:
                rows[self.groups.get(parameter.name or "", GROUPS[-1])].append(row)
        for group, found in rows.items():
            if found:
                with formatter.section(group):
                    formatter.write_dl(found)


def setting_command(name: str, method: str | None = None) -> Any:
    """Return the command that runs a setting: its options are the setting's and its methods'."""
    setting: type[Setting] = SETTINGS.get(name)
    methods = setting.methods() if method is None else (method,)
    options = generated_options(name, method)

    def command(**values: Any) -> None:
        from aniso.cli.run_setting import run_setting

        run_setting(name, _given(values) if method is None else {**_given(values), "method": method})

    parameters = _parameters(options, _schedule_texts(setting, methods), methods)
    return _command(name, SETTINGS.summary(name), parameters, options, command)


def generated_command(
    name: str,
    summary: str,
    options: Mapping[str, OptionInfo],
    run: Callable[[dict[str, Any]], None],
    example: tuple[type[Setting], str],
) -> Any:
    """Return a command with these options, which ``run`` gets by name if they were given.

    The help shows the schedule that a setting has by default with a method; ``example`` names both.
    """

    def command(**values: Any) -> None:
        run(_given(values))

    setting, method = example
    parameters = _parameters(options, _schedule_texts(setting, (method,)), (method,))
    return _command(name, summary, parameters, options, command)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None and value != []}


def _command(
    name: str,
    summary: str,
    parameters: list[inspect.Parameter],
    options: Mapping[str, OptionInfo],
    command: Any,
) -> Any:
    """Return a command whose function gets every option by name."""
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = summary
    grouped = type("SettingCommand", (_GroupedHelp,), {"groups": {k: o.group for k, o in options.items()}})
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command(name, cls=grouped)(command)
    return typer.main.get_command(app)


def _parameters(
    options: Mapping[str, OptionInfo], schedules: Mapping[str, str], methods: tuple[str, ...]
) -> list[inspect.Parameter]:
    """The parameters of a command's function: None means that the default holds."""
    out = []
    for name, info in options.items():
        kind = list[info.type] if info.multiple else info.type  # type: ignore[name-defined]
        declared = typer.Option(
            *info.flags,
            help=_help(info, schedules, methods),
            show_default=False,
            metavar=None if info.type is bool else _METAVARS[info.type],
        )
        annotation = Annotated[kind if info.required else kind | None, declared]  # type: ignore[valid-type]
        default = inspect.Parameter.empty if info.required else None
        out.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    return out


def _help(info: OptionInfo, schedules: Mapping[str, str], methods: tuple[str, ...]) -> str:
    """The help text with the choices and the default."""
    choices = methods if info.name == "method" else info.choices
    default = schedules.get(info.name) or _default_text(info)
    chosen = f" One of: {', '.join(choices)}." if choices else ""
    shown = f"  [default: {default}]" if default else ""
    return f"{info.help}{chosen}{shown}"


def _default_text(info: OptionInfo) -> str:
    if info.required or info.default is None or info.default == ():
        return ""
    if info.type is bool:
        return "" if info.default is False else "on"
    return f"{info.default:g}" if isinstance(info.default, float) else str(info.default)


def _schedule_texts(setting: type[Setting], methods: tuple[str, ...]) -> dict[str, str]:
    """The default of every optimiser option for this setting, and where a method has another one."""
    required: Any = {name: "" for name, field in setting.model_fields.items() if field.is_required()}
    texts: dict[str, list[str]] = {}
    for name in methods:
        method = METHODS.get(name)()
        if not isinstance(method, TrainingMethod):
            continue
        example = setting.model_construct(**required, method=method)
        for key, value in asdict(method.resolved_schedule(example)).items():
            text = f"{value:g}" if isinstance(value, float) else str(value)
            known = texts.setdefault(key, [])
            if value is not None and (not known or text != known[0]):
                known.append(f"{text} for {name}" if known else text)
    return {key: "; ".join(known) for key, known in texts.items()}
