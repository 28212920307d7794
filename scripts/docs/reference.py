"""Reference pages of the documentation site, made from the program itself.

``pages()`` returns the command line, the Python interface, file formats with their JSON schema, error codes,
exit codes and what is supported, as Markdown by path. Nothing here is committed as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tables import markdown_table, plain

_AREAS = {
    "aniso.vectors": "Task vectors and banks",
    "aniso.compose": "Compositions",
    "aniso.models": "Models",
    "aniso.data": "Tasks and data",
    "aniso.learn": "Learning and evaluation",
    "aniso.weights": "Weights on disk",
    "aniso.progress": "Progress",
    "aniso.errors": "Errors",
}
"""Headings of the packages that export names at the top level."""


def pages() -> dict[str, str]:
    """Return all reference pages, by path below the documentation."""
    return {
        **command_pages(),
        **python_pages(),
        **format_pages(),
        "reference/errors.md": errors_page(),
        "reference/exit-codes.md": exit_codes_page(),
        "reference/support.md": support_page(),
    }


# Command line


def command_pages() -> dict[str, str]:
    """Return a page for every command or group of commands, and one that lists them."""
    import typer

    from aniso.cli.app import app

    root: Any = typer.main.get_command(app)
    found = dict(_subcommands(root))
    rows = [
        (f"[`aniso {name}`]({name}.md)", plain(_summary(command)))
        for name, command in sorted(found.items(), key=lambda item: item[0])
    ]
    lines = [
        "# Command line",
        "",
        "Made from the program itself. `aniso COMMAND --help` prints the same. Every command has `--json` "
        "for programs where it prints results, and one of the [exit codes](../exit-codes.md).",
        "",
        markdown_table(("command", "what it does"), rows),
    ]
    own = {f"reference/cli/{name}.md": _command_page(name, command) for name, command in found.items()}
    return {"reference/cli/index.md": "\n".join(lines), **own}


def _subcommands(command: Any) -> Iterator[tuple[str, Any]]:
    """Name and command of everything below a group; the program's click is typer's own copy of it."""
    context = command.make_context(command.name or "aniso", [], resilient_parsing=True)
    for name in command.list_commands(context):
        yield name, command.get_command(context, name)


def _summary(command: Any) -> str:
    return str(command.help or "").strip().split("\n\n")[0].replace("\n", " ")


def _command_page(name: str, command: Any) -> str:
    lines = [f"# aniso {name}", "", _described(command), ""]
    if hasattr(command, "list_commands"):
        for sub, found in _subcommands(command):
            lines += [f"## aniso {name} {sub}", "", _described(found), "", *_usage(f"{name} {sub}", found)]
    else:
        lines += _usage(name, command)
    return "\n".join(lines)


def _described(command: Any) -> str:
    paragraphs = str(command.help or "").strip().split("\n\n")
    return "\n\n".join(plain(" ".join(paragraph.split())) for paragraph in paragraphs)


def _usage(name: str, command: Any) -> list[str]:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = command.get_usage(context).removeprefix("Usage: ").replace(name, f"aniso {name}", 1)
    lines = ["```text", usage, "```", ""]
    groups = getattr(command, "groups", {})
    rows: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        if parameter.name == "help" or getattr(parameter, "hidden", False):
            continue
        record = parameter.get_help_record(context)
        if record is None:
            continue
        group = groups.get(parameter.name, "Options" if parameter.opts[0].startswith("-") else "Arguments")
        rows.setdefault(group, []).append((f"`{record[0].strip()}`", plain(record[1])))
    for group, found in rows.items():
        lines += [f"**{group}**", "", markdown_table((group.lower(), "meaning"), found), ""]
    return lines


# Python


def python_pages() -> dict[str, str]:
    """Return a page for every package that exports names, and one for every namespace."""
    import aniso

    homes: dict[str, list[str]] = {}
    for name, home in aniso._HOMES.items():
        homes.setdefault(home, []).append(name)
    out, rows = {}, []
    for home, heading in _AREAS.items():
        page = home.rpartition(".")[2]
        names = homes.pop(home)
        body = [f"# {heading}", "", f"Names of `aniso`, defined in `{home}`.", ""]
        body += [f"::: aniso.{name}\n" for name in names]
        out[f"reference/python/{page}.md"] = "\n".join(body)
        rows.append((f"[{heading}]({page}.md)", ", ".join(f"`{name}`" for name in names)))
    if homes:
        raise ValueError(f"no heading for {sorted(homes)}")
    for name, module in aniso._MODULES.items():
        out[f"reference/python/{name}.md"] = f"# aniso.{name}\n\n::: {module}\n"
        rows.append((f"[`aniso.{name}`]({name}.md)", ""))
    lines = ["# Python", "", (aniso.__doc__ or "").strip().replace("``", "`"), ""]
    lines += [markdown_table(("page", "names"), rows)]
    return {"reference/python/index.md": "\n".join(lines), **out}


# File formats


def format_pages() -> dict[str, str]:
    """Return the page of the files that aniso writes, and the JSON schema of each that is JSON."""
    from aniso.analysis_records import AnalysisRecord
    from aniso.compose.coefficients import _Record as CoefficientRecord
    from aniso.data.card import Card
    from aniso.experiments.spec import Experiment
    from aniso.learn.heads.files import _Index as HeadIndex
    from aniso.prediction_files import PredictionHeader
    from aniso.records import Record
    from aniso.vectors._files.manifest import Manifest

    found: tuple[tuple[str, str, Any], ...] = (
        ("Bank", "`manifest.json` of a bank; vectors are in safetensors files beside it.", Manifest),
        ("Coefficients", "Metadata of a safetensors file with the coefficients.", CoefficientRecord),
        ("Head", "Metadata of a safetensors file with the head's tensors.", HeadIndex),
        ("Record", "`record.json` of a run, or a line of `records.jsonl`.", Record),
        ("Spec", "A YAML file for `aniso run`.", Experiment),
        ("Task card", "`task.toml` beside a task's data.", Card),
        ("Predictions", "Header of a file of predictions, in the `.meta.json` beside it.", PredictionHeader),
        ("Analysis", "The result of an analysis, as `aniso paper run` keeps it.", AnalysisRecord),
    )
    lines = [
        "# File formats",
        "",
        "aniso checks these files by the JSON schemas below when it reads them. A file may satisfy its "
        "schema and still be refused: hashes, sizes and what fits together are checked as well. Weights are "
        "safetensors files.",
        "",
    ]
    out = {}
    for heading, text, model in found:
        name = f"schema/{heading.lower().replace(' ', '-')}.json"
        schema = model.model_json_schema(by_alias=True)
        out[f"reference/{name}"] = json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
        lines += [f"## {heading}", "", f"{text} [JSON schema]({name}).", "", _fields(schema), ""]
    return {"reference/formats.md": "\n".join(lines), **out}


def _fields(schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = [
        (f"`{name}`", plain(_type_text(value)), "yes" if name in required else "")
        for name, value in schema["properties"].items()
    ]
    return markdown_table(("field", "type", "required"), rows)


def _type_text(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type_text(part) for part in schema["anyOf"])
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2].strip("_")
    if "const" in schema:
        return json.dumps(schema["const"])
    if schema.get("type") == "array" and isinstance(schema.get("items"), dict):
        return f"list of {_type_text(schema['items'])}"
    extra = schema.get("additionalProperties")
    if schema.get("type") == "object" and isinstance(extra, dict):
        return f"object of {_type_text(extra) or 'any'}"
    return str(schema.get("type", "any"))


# Errors


def errors_page() -> str:
    """Return every error code with its explanation, by its first word."""
    from aniso.errors import EXPLANATIONS

    lines = [
        "# Error codes",
        "",
        "`aniso explain CODE` prints the same. An error names its subject, what was found, what was "
        "expected, and what to type next; [exit codes](exit-codes.md) say of which kind it was.",
        "",
    ]
    groups: dict[str, list[str]] = {}
    for code in EXPLANATIONS:
        groups.setdefault(code.partition("-")[0], []).append(code)
    for group in sorted(groups):
        lines += [f"## {group}", ""]
        for code in sorted(groups[group]):
            lines += [f"**`{code}`** {plain(EXPLANATIONS[code])}", ""]
    return "\n".join(lines)


def exit_codes_page() -> str:
    """Return the exit codes of the error classes."""
    from aniso import errors

    listed = re.findall(r"\* (\w+Error) +exit (\d+) +(.+)", errors.__doc__ or "")
    rows = [("0", "", "done"), ("1", "", "a bug in aniso; please report it")]
    for name, code, meaning in listed:
        if getattr(errors, name).exit_code != int(code):
            raise ValueError(f"{name} does not exit with {code}")
        rows.append((code, f"`{name}`", plain(meaning)))
    lines = [
        "# Exit codes",
        "",
        markdown_table(("code", "class", "meaning"), rows),
        "",
        "A run that a signal ends saves its state and exits with 128 + the signal's number: 129 (hang up), "
        "130 (Ctrl-C) or 143 (terminate). `--resume` continues it. With `--json`, errors are JSON, too.",
    ]
    return "\n".join(lines)


# What is supported


def support_page() -> str:
    """Return what can be chosen by name, which methods fit which settings, and the known architectures."""
    from aniso.registry import REGISTRIES

    lines = ["# What is supported", "", "Read from the program: `aniso ls` prints the first tables.", ""]
    lines += ["## Settings and methods", "", _settings_by_methods(), ""]
    for registry in REGISTRIES:
        rows = [(f"`{name}`", plain(registry.summary(name))) for name in registry.names]
        lines += [f"## {registry.kind.capitalize()}s", "", markdown_table(("name", "what it does"), rows), ""]
    lines += ["## Architectures of transformers", "", _architectures(), ""]
    lines += ["## Bundled and known", "", *_bundled(), ""]
    return "\n".join(lines)


def _settings_by_methods() -> str:
    from aniso.registry import METHODS, SETTINGS

    settings = list(SETTINGS.names)
    rows = [
        (f"`{method}`", *("yes" if method in SETTINGS.get(name).methods() else "" for name in settings))
        for method in METHODS.names
    ]
    return markdown_table(("method", *(f"`{name}`" for name in settings)), rows)


def _architectures() -> str:
    from aniso.models import architectures

    loaders = [value for value in vars(architectures).values() if isinstance(value, architectures.Loader)]
    rows = [
        (loader.what, ", ".join(f"`{name}`" for name in sorted(loader.model_types))) for loader in loaders
    ]
    note = (
        "Model directories of these `model_type`s are built from their configuration. Any other network "
        "works as an `nn.Module` in Python, and open_clip and timm models by name."
    )
    return f"{note}\n\n{markdown_table(('loader', 'model types'), rows)}"


def _bundled() -> list[str]:
    from aniso.data.card import known_card, known_tasks

    cards = {name: known_card(name) for name in known_tasks()}
    rows = [(f"`{name}`", plain(card.title), str(len(card.classes) or "")) for name, card in cards.items()]
    text = "Data sets that `--task NAME` finds below `--data`:"
    return [text, "", markdown_table(("task", "title", "classes"), rows)]
