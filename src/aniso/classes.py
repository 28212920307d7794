"""Class lists: the names of classes and the prompts that turn them into text."""

from __future__ import annotations

import hashlib
import json
import string
from dataclasses import dataclass
from functools import cached_property

from aniso.errors import UsageError, printable

DEFAULT_PROMPTS = ("a photo of a {}.",)


@dataclass(frozen=True)
class ClassList:
    """Class names in label order, and prompts with one ``{}`` for the name."""

    names: tuple[str, ...]
    prompts: tuple[str, ...] = DEFAULT_PROMPTS

    def __post_init__(self) -> None:
        given: object = self.names
        if isinstance(given, str):
            raise UsageError("DATA-CLASS", "class names must be a list, not one text", fix='("cat", "dog")')
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "prompts", tuple(self.prompts))
        _check_names(self.names)
        _check_prompts(self.prompts)

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def key(self) -> str:
        """A hash that changes with any name, prompt or their order."""
        return hashlib.sha256(json.dumps([self.names, self.prompts]).encode()).hexdigest()

    def texts(self) -> list[list[str]]:
        """Return, for every class, its prompts with the name filled in."""
        return [[prompt.format(name) for prompt in self.prompts] for name in self.names]


def _check_names(names: tuple[str, ...]) -> None:
    if not names:
        raise UsageError("DATA-CLASS", "there are no classes", fix="name at least two classes")
    empty = [i for i, name in enumerate(names) if not isinstance(name, str) or not name.strip()]
    if empty:
        raise UsageError(
            "DATA-CLASS",
            f"class {empty[0]} has no name",
            found=f"{len(empty)} empty of {len(names)}",
            fix="give every class a name: prompts contain it",
        )
    seen: dict[str, int] = {}
    for i, name in enumerate(names):
        if name in seen:
            raise UsageError(
                "DATA-CLASS",
                f"classes {seen[name]} and {i} have the same name",
                found=printable(name),
                fix="give them different names: equal names give equal class weights",
            )
        seen[name] = i


def _check_prompts(prompts: tuple[str, ...]) -> None:
    if not prompts:
        raise UsageError("DATA-PROMPT", "there are no prompts", fix=f"for example '{DEFAULT_PROMPTS[0]}'")
    for prompt in prompts:
        if _fields(prompt) != [""]:
            raise UsageError(
                "DATA-PROMPT",
                "a prompt needs exactly one {} for the class name",
                found=printable(prompt),
                expected="for example 'a photo of a {}.'",
                fix="correct the prompt; write {{ and }} for literal braces",
            )


def _fields(prompt: str) -> list[str | None]:
    """Return the names of a prompt's replacement fields."""
    try:
        found = [
            (name, spec, how) for _, name, spec, how in string.Formatter().parse(prompt) if name is not None
        ]
    except (ValueError, TypeError, AttributeError):
        return [None]
    return [name if not spec and how is None else None for name, spec, how in found]
