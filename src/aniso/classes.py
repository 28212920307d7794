"""The classes of a task, and the prompts and descriptions that class weights are made from."""

from __future__ import annotations

import hashlib
import json
import string
from dataclasses import dataclass
from functools import cached_property

from aniso.errors import UsageError, printable

DEFAULT_PROMPTS = ("a photo of a {}.",)
TEXT_PROMPTS = ("{}",)
"""The default for tasks of texts: the description or name alone."""


@dataclass(frozen=True)
class ClassList:
    """Class names in label order, and prompts with one ``{}`` for the name."""

    names: tuple[str, ...]
    prompts: tuple[str, ...] = DEFAULT_PROMPTS
    descriptions: tuple[str, ...] = ()
    """What prompts are filled with, one phrase per class; default: the names."""

    def __post_init__(self) -> None:
        given: object = self.names
        if isinstance(given, str):
            raise UsageError("DATA-CLASS", "class names must be a list, not one text", fix='("cat", "dog")')
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "prompts", tuple(self.prompts))
        object.__setattr__(self, "descriptions", tuple(self.descriptions))
        _check_names(self.names)
        _check_descriptions(self.descriptions, self.names)
        _check_prompts(self.prompts)

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def key(self) -> str:
        """Changes whenever a name, a description, a prompt or an order does."""
        words = [self.names, self.prompts, *([self.descriptions] if self.descriptions else [])]
        return hashlib.sha256(json.dumps(words).encode()).hexdigest()

    def texts(self) -> list[list[str]]:
        """Return, for every class, its prompts with the description or the name filled in."""
        return [[prompt.format(name) for prompt in self.prompts] for name in self.descriptions or self.names]


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


def _check_descriptions(descriptions: tuple[str, ...], names: tuple[str, ...]) -> None:
    empty = [i for i, text in enumerate(descriptions) if not isinstance(text, str) or not text.strip()]
    twice = len(set(descriptions)) < len(descriptions)
    if empty or twice or (descriptions and len(descriptions) != len(names)):
        raise UsageError(
            "DATA-CLASS",
            "the descriptions of classes cannot be used",
            found=f"{len(descriptions)} descriptions, {len(set(descriptions))} different, {len(empty)} empty",
            expected=f"{len(names)} different phrases, one per class, in the order of the classes",
            fix="correct 'descriptions' in card.json, or leave it out to use the class names",
        )


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
