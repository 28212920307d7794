"""A server of one page on the loopback interface, for whoever has the address with its token."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated, Any, TypeVar, final
from urllib.parse import parse_qs, unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aniso.errors import AnisoError, printable
from aniso.explore.commands import COEFFICIENTS
from aniso.explore.desk import Desk
from aniso.explore.items import LARGEST_IMAGE
from aniso.explore.page import desk_page
from aniso.explore.predictor import Predictor
from aniso.json_value import JsonObject

HOST = "127.0.0.1"
TOKEN = "X-Aniso-Token"
_NAME = "X-Aniso-Name"
MOST_CONNECTIONS = 16
_TIMEOUT = 20.0  # seconds that a connection may be silent
_JSON = 4 << 20  # bytes of a table: 24 vectors of 8,000 blocks
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: text/plain\r\n\r\ntoo many connections\n"
M = TypeVar("M", bound=BaseModel)
_Row = list[Annotated[float, Field(ge=-1e9, le=1e9)] | None]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False, allow_inf_nan=False)


class _Values(_Request):
    values: Annotated[list[_Row], Field(max_length=1 << 16)]


class _Preset(_Request):
    name: Annotated[str, Field(max_length=200)]


class _Text(_Request):
    text: Annotated[str, Field(max_length=1 << 20)]


class _Number(_Request):
    number: int


@final
@dataclass(frozen=True)
class _Answer:
    """The body of a response."""

    content: bytes
    kind: str = "application/json"
    policy: str = "default-src 'none'"
    file: str = ""


@final
@dataclass(frozen=True)
class _Route:
    """What a path does with a body of at most so many bytes."""

    run: Callable[[_Handler, bytes], _Answer]
    method: str = "POST"
    largest: int = _JSON


class _RefusedError(Exception):
    """A request that is answered with a status and a sentence."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        self.status, self.message = status, message
        super().__init__(message)


@final
class DeskServer:
    """Serves a desk until it is closed::

    with DeskServer(desk).running() as server:
        print(server.url)
    """

    def __init__(self, desk: Desk, port: int = 0) -> None:
        """``port`` 0 takes a free one."""
        self.desk = desk
        self.token = secrets.token_urlsafe(24)
        self._http = _Server((HOST, port), desk, self.token)
        self.port = int(self._http.server_address[1])

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        return f"http://{HOST}:{self.port}/?token={self.token}"

    def serve(self) -> None:
        """Answer requests until ``close`` is called, or this thread is interrupted."""
        threading.Thread(target=self.desk.compute_geometry, name="aniso-geometry", daemon=True).start()
        self._http.serve_forever(poll_interval=0.1)

    @contextmanager
    def running(self) -> Iterator[DeskServer]:
        """Serve in a thread of its own."""
        thread = threading.Thread(target=self.serve, name="aniso-explore", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.close()
            thread.join()

    def close(self) -> None:
        """Stop serving in another thread, and free the port."""
        self._http.shutdown()
        self.release()

    def release(self) -> None:
        """Free the port of a server that does not serve any more."""
        self._http.server_close()


@final
class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, address: tuple[str, int], desk: Desk, token: str) -> None:
        self.desk, self.token = desk, token
        self.page = desk_page(desk.title)
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, or refuse it if there are too many."""
        if not self._free.acquire(blocking=False):
            try:
                request.settimeout(1.0)
                request.sendall(_BUSY)
            except OSError:
                pass
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes a connection early is no error."""
        if not isinstance(sys.exception(), OSError | socket.timeout):
            traceback.print_exc()


@final
class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _TIMEOUT
    server_version, sys_version = "aniso", ""

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def log_message(self, *args: Any) -> None:
        """Requests are not logged: their addresses hold the token."""

    def _answer(self, method: str) -> None:
        try:
            route = self._checked(method)
            self._send(HTTPStatus.OK, route.run(self, self._body(route.largest)))
        except _RefusedError as e:
            self._send_error(e.status, {"error": "REFUSED", "message": e.message, "fix": ""})
        except AnisoError as e:
            found = {"error": e.code, "message": e.message, "fix": e.fix}
            self._send_error(HTTPStatus.UNPROCESSABLE_ENTITY, dict(found))
        except OSError:
            raise
        except Exception:
            traceback.print_exc()
            body: JsonObject = {"error": "BUG", "message": "the server failed: see the terminal", "fix": ""}
            self._send_error(HTTPStatus.INTERNAL_SERVER_ERROR, body)

    def _checked(self, method: str) -> _Route:
        """Return the route of the request; raises unless it comes from our own page."""
        port = self.server.server_address[1]
        hosts = {f"{HOST}:{port}", f"localhost:{port}"}
        if self.headers.get("Host", "") not in hosts:  # a foreign name that resolves to this machine
            raise _RefusedError(HTTPStatus.MISDIRECTED_REQUEST, "this server answers to 127.0.0.1 alone")
        origin = self.headers.get("Origin")
        if origin is not None and origin not in {f"http://{host}" for host in hosts}:
            raise _RefusedError(HTTPStatus.FORBIDDEN, "requests of other sites are refused")
        address = urlsplit(self.path)
        route = _ROUTES.get(address.path)
        given = self.headers.get(TOKEN, "")
        if route is _ROUTES["/"]:
            given = (parse_qs(address.query).get("token") or [""])[0]
        elif self.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            raise _RefusedError(HTTPStatus.FORBIDDEN, "requests of other sites are refused")
        if not hmac.compare_digest(given.encode(), self.server.token.encode()):
            raise _RefusedError(
                HTTPStatus.FORBIDDEN, "wrong token: use the address that aniso explore printed"
            )
        if route is None:
            raise _RefusedError(HTTPStatus.NOT_FOUND, "there is no such page")
        if method != route.method:
            raise _RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, f"this address takes {route.method}")
        return route

    def _body(self, largest: int) -> bytes:
        if self.command == "GET":
            return b""
        length = self.headers.get("Content-Length", "")
        if "Transfer-Encoding" in self.headers or not length.isdecimal() or len(length) > 12:
            raise _RefusedError(HTTPStatus.LENGTH_REQUIRED, "the length of the body is not known")
        if int(length) > largest:
            self.close_connection = True
            raise _RefusedError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{int(length):,} bytes: at most {largest:,} are read"
            )
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "the body is shorter than its length says")
        return body

    def _send_error(self, status: HTTPStatus, body: JsonObject) -> None:
        self._send(status, _Answer(json.dumps(body).encode()))

    def _send(self, status: HTTPStatus, answer: _Answer) -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", answer.policy)
        self.send_header("Content-Type", f"{answer.kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(answer.content)))
        if answer.file:
            self.send_header("Content-Disposition", f'attachment; filename="{answer.file}"')
        self.end_headers()
        self.wfile.write(answer.content)

    # what the routes do

    @property
    def desk(self) -> Desk:
        return self.server.desk

    @property
    def predictor(self) -> Predictor:
        if self.desk.predictor is None:
            raise _RefusedError(
                HTTPStatus.CONFLICT, "this desk has no model: start it with --task or --classes"
            )
        return self.desk.predictor

    def page(self, body: bytes) -> _Answer:
        text, policy = self.server.page
        return _Answer(text.encode(), "text/html", policy)

    def describe(self, body: bytes) -> _Answer:
        return _json(self.desk.describe())

    def geometry(self, body: bytes) -> _Answer:
        return _json(self.desk.geometry())

    def preset(self, body: bytes) -> _Answer:
        return _json({"values": self.desk.preset(_read(_Preset, body).name)})

    def measure(self, body: bytes) -> _Answer:
        return _json(self.desk.measure(_read(_Values, body).values))

    def command_text(self, body: bytes) -> _Answer:
        return _json(self.desk.command(_read(_Values, body).values))

    def save(self, body: bytes) -> _Answer:
        made = self.desk.coefficients(_read(_Values, body).values)
        return _Answer(made.to_bytes(), "application/octet-stream", file=COEFFICIENTS)

    def bake(self, body: bytes) -> _Answer:
        return _json({"path": str(self.desk.bake(_read(_Values, body).values))})

    def add_image(self, body: bytes) -> _Answer:
        name = unquote(self.headers.get(_NAME, "image"))
        self.predictor.items.add_image(body, name)
        return _json({"items": self.desk.item_list()})

    def add_text(self, body: bytes) -> _Answer:
        self.predictor.items.add_text(_read(_Text, body).text)
        return _json({"items": self.desk.item_list()})

    def remove_item(self, body: bytes) -> _Answer:
        self.predictor.items.remove(_read(_Number, body).number)
        return _json({"items": self.desk.item_list()})


_ROUTES = {
    "/": _Route(_Handler.page, "GET"),
    "/desk": _Route(_Handler.describe, "GET"),
    "/geometry": _Route(_Handler.geometry, "GET"),
    "/preset": _Route(_Handler.preset, largest=1 << 12),
    "/measure": _Route(_Handler.measure),
    "/command": _Route(_Handler.command_text),
    "/save": _Route(_Handler.save),
    "/bake": _Route(_Handler.bake),
    "/items/image": _Route(_Handler.add_image, largest=LARGEST_IMAGE),
    "/items/text": _Route(_Handler.add_text, largest=1 << 18),
    "/items/remove": _Route(_Handler.remove_item, largest=1 << 10),
}


def _json(value: JsonObject) -> _Answer:
    return _Answer(json.dumps(value, allow_nan=False).encode())


def _read(kind: type[M], body: bytes) -> M:
    try:
        return kind.model_validate_json(body)
    except ValidationError as e:
        first = e.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        message = printable(f"{where}: {first['msg']}" if where else first["msg"])
        raise _RefusedError(HTTPStatus.BAD_REQUEST, f"the request cannot be read: {message}") from None
