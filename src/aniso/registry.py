"""Registries: everything that can be chosen by name, and added by one file.

Objectives, heads, selection rules, merge rules, settings, methods, partitions, readers and engines each
have a registry. A class is added by a decorator in its own file::

    @HEADS.register("nearest-mean")
    class NearestMean(Head):
        \"\"\"Classify by the nearest class mean.\"\"\"

A file in aniso's own package needs nothing else. Another package names its class as an entry point of the
group ``aniso.heads`` (``aniso.objectives``, ``aniso.settings`` and so on)::

    [project.entry-points."aniso.heads"]
    nearest-mean = "my_package.nearest_mean:NearestMean"

Names and descriptions are known without importing anything: decorators are read from the source, so that a
command can list the heads, or refuse an unknown one, without the seconds that importing torch takes.
"""

from __future__ import annotations

import ast
import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar, final

from aniso.errors import UsageError, printable

C = TypeVar("C", bound=Callable[..., Any])
"""A class, or a function."""
_ROOT = Path(__file__).parent


@final
@dataclass(frozen=True)
class _Declared:
    """A registered class that may not have been imported yet."""

    module: str
    summary: str


@final
class Registry:
    """Classes of one kind by name."""

    def __init__(self, kind: str, package: str, group: str, aliases: Mapping[str, str] | None = None) -> None:
        """``kind`` is used in messages; ``package`` holds aniso's own, ``group`` names entry points.

        ``aliases`` are earlier names that are still read: old -> new.
        """
        self.kind = kind
        self.package = package
        self.group = group
        self.aliases = dict(aliases or {})
        self._classes: dict[str, Callable[..., Any]] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """Decorator: make a class or function available as ``name``."""

        def add(cls: C) -> C:
            known = self._classes.get(name)
            if known is not None and _place(known) != _place(cls):
                raise UsageError(
                    "USAGE",
                    f"two things are registered as {self.kind} '{name}'",
                    found=f"{_place(known)}, {_place(cls)}",
                    fix="rename one of them",
                )
            self._classes[name] = cls
            return cls

        return add

    @property
    def names(self) -> tuple[str, ...]:
        """All names: aniso's own in the order of their files, then those of other packages."""
        return tuple(dict.fromkeys((*self._declared, *self._entry_points, *self._classes)))

    def canonical(self, name: str) -> str:
        """Return today's name of what may be called by an earlier one."""
        return self.aliases.get(name, name)

    def alias_note(self, name: str) -> str:
        """Return the note on an earlier name."""
        return f"{self.kind} '{name}' is now called '{self.aliases[name]}'; the old name still works"

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def require(self, name: str, *, option: str = "") -> None:
        """Raise an error that lists the known names unless ``name`` is one; nothing is imported."""
        if name in self:
            return
        near = difflib.get_close_matches(name, self.names, 1)
        fix = near[0] if near else self.names[0]
        raise UsageError(
            "USAGE",
            f"there is no {self.kind} '{printable(name)}'",
            expected=", ".join(self.names),
            likely=f"did you mean '{near[0]}'?" if near else "",
            fix=f"{option} {fix}".strip(),
        )

    def get(self, name: str) -> Any:
        """Return the class registered as ``name``, importing its file if needed."""
        self.require(name)
        if name not in self._classes:
            if name in self._declared:
                importlib.import_module(self._declared[name].module)
            else:
                self.register(name)(self._entry_points[name].load())
        return self._classes[name]

    def name_of(self, cls: Callable[..., Any]) -> str:
        """Return the name that a class was registered with."""
        return next(name for name, known in self._classes.items() if known is cls)

    def summary(self, name: str) -> str:
        """Return the first line of a class's docstring; only classes of other packages are imported."""
        self.require(name)
        if name in self._declared:
            return self._declared[name].summary
        return ((self.get(name).__doc__ or "").strip().splitlines() or [""])[0]

    @cached_property
    def _declared(self) -> dict[str, _Declared]:
        """Classes of aniso's own package, as their decorators name them."""
        directory = _ROOT.joinpath(*self.package.split(".")[1:])
        out: dict[str, _Declared] = {}
        for path in sorted(directory.glob("*.py")):
            for node in ast.parse(path.read_bytes()).body:
                if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                    continue
                if (name := _registered_name(node)) is not None:
                    summary = ((ast.get_docstring(node) or "").splitlines() or [""])[0]
                    out[name] = _Declared(f"{self.package}.{path.stem}", summary)
        return out

    @cached_property
    def _entry_points(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.group)}


def _place(registered: Callable[..., Any]) -> str:
    return f"{registered.__module__}.{registered.__qualname__}"


def _registered_name(node: ast.ClassDef | ast.FunctionDef) -> str | None:
    """The name in ``@SOMETHING.register("name")``."""
    for call in node.decorator_list:
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr == "register"
            and isinstance(call.args[0], ast.Constant)
        ):
            return str(call.args[0].value)
    return None


EARLIER_SETTINGS = {"peft": "data-fraction"}
"""Names of settings in earlier specs, commands and records."""
SETTINGS = Registry("setting", "aniso.experiments.settings", "aniso.settings", EARLIER_SETTINGS)
METHODS = Registry("method", "aniso.experiments.methods", "aniso.methods")
OBJECTIVES = Registry("objective", "aniso.learn.objectives", "aniso.objectives")
HEADS = Registry("head", "aniso.learn.heads", "aniso.heads")
SELECTION_RULES = Registry("selection rule", "aniso.learn.selection", "aniso.selection")
PARTITIONS = Registry("partition", "aniso.compose.partitions", "aniso.partitions")
MERGE_RULES = Registry("merge rule", "aniso.merge", "aniso.merge")
READERS = Registry("reader", "aniso.data.readers", "aniso.readers")
ENGINES = Registry("engine", "aniso.experiments.engines", "aniso.engines")
REGISTRIES = (
    SETTINGS,
    METHODS,
    OBJECTIVES,
    HEADS,
    SELECTION_RULES,
    MERGE_RULES,
    PARTITIONS,
    READERS,
    ENGINES,
)
