"""Servers on loopback: of index pages and files by ranges, and one that answers as the Hugging Face Hub does.

Requests for files fail as ``faults`` says: a function of the path and the number of times that it was asked
for, which returns a status, or the number of bytes after which the connection ends.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

REPOSITORY = "someone/adapters"
_COMMIT = "c" * 40
Faults = Callable[[str, int], int | None]


class FileServer(ThreadingHTTPServer):
    """Files by path, and a count of the bytes and requests for them."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.faults: Faults = lambda path, times: None
        self.asked: list[tuple[str, str]] = []
        self.sent = 0
        self.hosts: set[str] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FileServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = urlsplit(self.path).path.strip("/")
        resolve = f"{REPOSITORY}/resolve/"
        if path.startswith(f"api/models/{REPOSITORY}"):
            self._api(path)
        elif path.startswith(resolve):
            self._file(path.removeprefix(resolve).partition("/")[2], body)
        elif path in self.server.files:
            self._file(path, body)
        else:
            self._index(path, body)

    def _api(self, path: str) -> None:
        rest = path.removeprefix(f"api/models/{REPOSITORY}").strip("/")
        if rest.startswith("tree/"):
            below = "/".join(rest.split("/")[2:])
            found = [self._entry(name) for name in sorted(self.server.files) if name.startswith(below)]
            self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})
        else:
            about = {"id": REPOSITORY, "modelId": REPOSITORY, "sha": _COMMIT, "private": False, "tags": []}
            self._send(
                200, json.dumps({**about, "siblings": []}).encode(), {"Content-Type": "application/json"}
            )

    def _entry(self, name: str) -> dict[str, Any]:
        data = self.server.files[name]
        return {"type": "file", "path": name, "size": len(data), "oid": f"{hash(data):x}"}

    def _index(self, path: str, body: bool) -> None:
        prefix = f"{path}/" if path else ""
        names = {n.removeprefix(prefix).split("/")[0] + "/" * ("/" in n.removeprefix(prefix))
                 for n in self.server.files if n.startswith(prefix)}  # fmt: skip
        if not names:
            return self._send(404, b"")
        links = "".join(f'<a href="{name}">{name}</a>\n' for name in sorted(names))
        return self._send(200, links.encode() if body else b"", {"Content-Type": "text/html"})

    def _file(self, name: str, body: bool) -> None:
        data = self.server.files.get(name)
        if data is None:
            return self._send(404, b"")
        kind = "GET" if body else "HEAD"
        self.server.asked.append((kind, name))
        fault = self.server.faults(name, self.server.asked.count((kind, name)))
        if fault is not None and fault >= 400:
            return self._send(fault, b"slow down")
        start, stop, status = 0, len(data), 200
        if self.headers.get("Range"):
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            start, stop, status = int(first), min(len(data), int(last) + 1 if last else len(data)), 206
        about = {"ETag": f'"{hash(data):x}"', "Accept-Ranges": "bytes"}
        if status == 206:
            about["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self._send(status, data[start:stop] if body else b"", about, length=stop - start, most=fault)
        return None

    def _send(
        self,
        status: int,
        data: bytes,
        headers: dict[str, str] | None = None,
        *,
        length: int | None = None,
        most: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        if self.command == "GET":
            sent = data if most is None else data[:most]
            self.wfile.write(sent)
            self.server.sent += len(sent)
            if len(sent) < len(data):
                self.close_connection = True


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[FileServer]:
    """Serve files on a free port."""
    server = FileServer(files)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
