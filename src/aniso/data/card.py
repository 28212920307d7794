"""Task cards: the name of a dataset, how to read and split it, its class names and prompts."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache, cached_property
from importlib import resources
from pathlib import Path, PurePath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from aniso.classes import DEFAULT_PROMPTS
from aniso.errors import InputError, printable

_LARGEST = 4 << 20


class Carve(BaseModel):
    """A split that is cut out of the training images."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: Annotated[float, Field(gt=0, lt=1)] | None = None
    most: Annotated[int, Field(gt=0)] | None = None
    per_class: Annotated[int, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _require_amount(self) -> Carve:
        if (self.per_class is None) == (self.share is None and self.most is None):
            raise ValueError("give per_class, or share, or most, or share and most")
        return self


class SplitRules(BaseModel):
    """Where each split comes from: a part of the dataset, several joined, or a piece of train."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    train: str | tuple[str, ...] | None = None
    val: str | Carve | None = None
    test: str | Carve | None = None


class Card(BaseModel):
    """The content of a task's TOML file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str = ""
    homepage: str = ""
    licence: str = ""
    metric: str = "accuracy"
    notes: str = ""
    epochs: int | None = None
    prompts: tuple[str, ...] = DEFAULT_PROMPTS
    reader: dict[str, object] = Field(default_factory=dict)
    splits: SplitRules | None = None
    classes: dict[str, str] = Field(default_factory=dict)

    @cached_property
    def kind(self) -> str:
        return str(self.reader.get("kind", ""))

    @property
    def settings(self) -> Mapping[str, object]:
        return {name: value for name, value in self.reader.items() if name not in ("kind", "fetch")}


def read_card(path: Path) -> Card:
    """Read a card from a TOML file; an unknown key is an error."""
    try:
        if path.stat().st_size > _LARGEST:
            raise _bad(path, f"{path.stat().st_size:,} bytes", "a small text file")
        return Card.model_validate(tomllib.loads(path.read_text("utf-8")))
    except OSError as e:
        raise _bad(path, e.strerror or str(e), "a readable file") from None
    except ValidationError as e:
        # the most specific error: where text or a table is allowed, there is one for each
        first = max(e.errors(), key=lambda error: (len(error["loc"]), error["type"] != "string_type"))
        place = ".".join(str(word) for word in first["loc"])
        raise _bad(path, f"{place}: {first['msg']}", ", ".join(Card.model_fields)) from None
    except (ValueError, RecursionError) as e:  # of tomllib, also for numbers too long and for deep nesting
        raise _bad(path, printable(e), "TOML") from None


def known_tasks() -> tuple[str, ...]:
    """Return the names of the bundled cards."""
    return tuple(
        sorted(p.name.removesuffix(".toml") for p in _catalogue().iterdir() if p.name.endswith(".toml"))
    )


def known_name(ref: str) -> str | None:
    """Return the name of the known task that ``ref`` names, by itself or as the end of a path; else None.

    >>> known_name("./data/MNIST")
    'mnist'
    """
    names = {_plain(name): name for name in known_tasks()}
    return names.get(_plain(PurePath(ref).name.removesuffix(".toml")))


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", "", name).casefold()


@cache
def known_card(name: str) -> Card:
    """Return a bundled card; each is read once, since settings ask for it in every run of a grid."""
    return read_card(Path(str(_catalogue() / f"{name}.toml")))


def _catalogue() -> Any:
    return resources.files("aniso.data") / "catalogue"


def _bad(path: Path, found: str, expected: str) -> InputError:
    return InputError(
        "DATA-CARD",
        f"'{printable(path)}' is not a task card",
        found=found,
        expected=expected,
        fix="see docs/howto/tasks.md for the keys of a card",
    )
