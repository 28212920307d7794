"""A server of one page on the loopback interface, for whoever has the address with its token."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, final
from urllib.parse import parse_qs, unquote, urlsplit

from aniso.errors import AnisoError
from aniso.explore.commands import COEFFICIENTS
from aniso.explore.desk import Desk
from aniso.explore.items import LARGEST_IMAGE
from aniso.explore.page import desk_page
from aniso.explore.requests import REQUESTS, InvalidRequestError, add_image
from aniso.json_value import JsonObject

HOST = "127.0.0.1"
TOKEN = "X-Aniso-Token"
_NAME = "X-Aniso-Name"
_UPLOAD = "/items/image"
MOST_CONNECTIONS = 16
_TIMEOUT = 20.0  # seconds that a connection may be silent
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: text/plain\r\n\r\ntoo many connections\n"


@final
@dataclass(frozen=True)
class _Answer:
    """The body of a response."""

    content: bytes
    kind: str = "application/json"
    policy: str = "default-src 'none'"
    file: str = ""


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
            self._send(HTTPStatus.OK, self._run(method))
        except _RefusedError as e:
            self._send_error(e.status, {"error": "REFUSED", "message": e.message, "fix": ""})
        except InvalidRequestError as e:
            message = f"the request cannot be read: {e}"
            self._send_error(HTTPStatus.BAD_REQUEST, {"error": "REFUSED", "message": message, "fix": ""})
        except AnisoError as e:
            found: JsonObject = {"error": e.code, "message": e.message, "fix": e.fix}
            self._send_error(HTTPStatus.UNPROCESSABLE_ENTITY, found)
        except OSError:
            raise
        except Exception:
            traceback.print_exc()
            body: JsonObject = {"error": "BUG", "message": "the server failed: see the terminal", "fix": ""}
            self._send_error(HTTPStatus.INTERNAL_SERVER_ERROR, body)

    def _run(self, method: str) -> _Answer:
        self._require_own_host_and_origin()
        address = urlsplit(self.path)
        if address.path == "/":
            self._require_token((parse_qs(address.query).get("token") or [""])[0])
            _require_method(method, "GET")
            text, policy = self.server.page
            return _Answer(text.encode(), "text/html", policy)
        if self.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            raise _RefusedError(HTTPStatus.FORBIDDEN, "requests of other sites are refused")
        self._require_token(self.headers.get(TOKEN, ""))
        kind = REQUESTS.get(address.path)
        if kind is None:
            raise _RefusedError(HTTPStatus.NOT_FOUND, "there is no such page")
        _require_method(method, "POST" if kind.largest else "GET")
        if address.path == _UPLOAD:  # the file itself, not base64 in JSON
            body = self._body(LARGEST_IMAGE)
            return _json(add_image(self.server.desk, body, unquote(self.headers.get(_NAME, "image"))))
        found = kind.run(self.server.desk, self._body(kind.largest) if kind.largest else b"")
        if isinstance(found, bytes):
            return _Answer(found, "application/octet-stream", file=COEFFICIENTS)
        return _json(found)

    def _require_own_host_and_origin(self) -> None:
        port = self.server.server_address[1]
        hosts = {f"{HOST}:{port}", f"localhost:{port}"}
        if self.headers.get("Host", "") not in hosts:  # a foreign name that resolves to this machine
            raise _RefusedError(HTTPStatus.MISDIRECTED_REQUEST, "this server answers to 127.0.0.1 alone")
        origin = self.headers.get("Origin")
        if origin is not None and origin not in {f"http://{host}" for host in hosts}:
            raise _RefusedError(HTTPStatus.FORBIDDEN, "requests of other sites are refused")

    def _require_token(self, given: str) -> None:
        if not hmac.compare_digest(given.encode(), self.server.token.encode()):
            message = "wrong token: use the address that aniso explore printed"
            raise _RefusedError(HTTPStatus.FORBIDDEN, message)

    def _body(self, largest: int) -> bytes:
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


def _require_method(given: str, expected: str) -> None:
    if given != expected:
        raise _RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, f"this address takes {expected}")


def _json(value: JsonObject) -> _Answer:
    return _Answer(json.dumps(value, allow_nan=False).encode())
