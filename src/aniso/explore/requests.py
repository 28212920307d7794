"""Requests of the page by name, from a browser or a notebook: each reads its JSON and asks the desk."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aniso.errors import UsageError, printable
from aniso.explore.desk import Desk
from aniso.explore.items import LARGEST_IMAGE
from aniso.explore.predictor import Predictor
from aniso.json_value import JsonObject

_LARGEST_TABLE = 4 << 20  # bytes: 24 vectors of 8,000 blocks
M = TypeVar("M", bound=BaseModel)
_Row = list[Annotated[float, Field(ge=-1e9, le=1e9)] | None]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class _Values(_Request):
    values: Annotated[list[_Row], Field(max_length=1 << 16)]


class _Preset(_Request):
    name: Annotated[str, Field(max_length=200)]


class _Image(_Request):
    name: Annotated[str, Field(max_length=1000)]
    content: Annotated[str, Field(max_length=2 * LARGEST_IMAGE)]
    """Base64 of the encoded image."""


class _Text(_Request):
    text: Annotated[str, Field(max_length=1 << 20)]


class _Number(_Request):
    number: int


class InvalidRequestError(Exception):
    """A body that is not what its request takes."""


@final
@dataclass(frozen=True)
class RequestKind:
    """What a request does with a body of at most so many bytes; those without a body are asked with GET."""

    run: Callable[[Desk, bytes], JsonObject | bytes]
    largest: int = _LARGEST_TABLE


def _values(body: bytes) -> list[_Row]:
    return _read(_Values, body).values


def _add_image(desk: Desk, body: bytes) -> JsonObject:
    given = _read(_Image, body)
    try:
        content = base64.b64decode(given.content, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequestError("content: no base64") from None
    return add_image(desk, content, given.name)


def add_image(desk: Desk, content: bytes, name: str) -> JsonObject:
    """Add an encoded image to the desk's items."""
    _predictor(desk).items.add_image(content, name)
    return {"items": desk.item_list()}


def _add_text(desk: Desk, body: bytes) -> JsonObject:
    _predictor(desk).items.add_text(_read(_Text, body).text)
    return {"items": desk.item_list()}


def _remove_item(desk: Desk, body: bytes) -> JsonObject:
    _predictor(desk).items.remove(_read(_Number, body).number)
    return {"items": desk.item_list()}


REQUESTS = {
    "/desk": RequestKind(lambda desk, body: desk.describe(), 0),
    "/geometry": RequestKind(lambda desk, body: desk.geometry(), 0),
    "/preset": RequestKind(lambda desk, body: {"values": desk.preset(_read(_Preset, body).name)}, 1 << 12),
    "/measure": RequestKind(lambda desk, body: desk.measure(_values(body))),
    "/command": RequestKind(lambda desk, body: desk.command(_values(body))),
    "/save": RequestKind(lambda desk, body: desk.coefficients(_values(body)).to_bytes()),
    "/bake": RequestKind(lambda desk, body: {"path": str(desk.bake(_values(body)))}),
    "/items/image": RequestKind(_add_image, 2 * LARGEST_IMAGE),
    "/items/text": RequestKind(_add_text, 1 << 18),
    "/items/remove": RequestKind(_remove_item, 1 << 10),
}


def _predictor(desk: Desk) -> Predictor:
    if desk.predictor is None:
        raise UsageError("USAGE", "this desk has no model", fix="start it with --task or --classes")
    return desk.predictor


def _read(kind: type[M], body: bytes) -> M:
    try:
        return kind.model_validate_json(body)
    except ValidationError as e:
        first = e.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidRequestError(printable(f"{where}: {first['msg']}" if where else first["msg"])) from None
