"""The desk's server refuses whatever does not come from its own page, and bounds what it reads."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import threading
import time
from collections.abc import Iterator

import desks
import pictures
import pytest
import runs
from desks import ask
from PIL import Image

from aniso.explore import Desk, DeskServer
from aniso.explore.items import LARGEST_IMAGE
from aniso.explore.server import MOST_CONNECTIONS


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return desks.photo_desk(runs.shelf(tmp_path_factory.mktemp("shelf")))


@pytest.fixture(scope="module")
def server(desk: Desk) -> Iterator[DeskServer]:
    with DeskServer(desk).running() as running:
        yield running


def raw(server: DeskServer, request: bytes) -> bytes:
    """The answer to bytes as they are."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(request)
        parts = []
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):
                parts.append(part)
        return b"".join(parts)


def test_the_page_needs_the_token_and_allows_nothing_foreign(server):
    found = ask(server, f"/?token={server.token}", token="")
    assert found.status == 200 and found.headers["Content-Type"].startswith("text/html")
    policy = found.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert "unsafe" not in policy and "http" not in policy.replace("http-equiv", "")
    assert server.token.encode() not in found.content
    for text in (b"http://", b"https://", b"@import", b'src="/'):
        assert text not in found.content.replace(b"http://www.w3.org", b"")
    assert found.headers["Referrer-Policy"] == "no-referrer"
    assert found.headers["X-Frame-Options"] == "DENY"


@pytest.mark.parametrize("token", ["", "wrong", "é", "x" * 5000])
def test_a_wrong_token_is_refused_everywhere(server, token, desk):
    for path in ("/desk", "/geometry", "/nowhere"):
        assert raw(server, _request("GET", path, server, token)).startswith(b"HTTP/1.0 403")
    assert ask(server, "/?token=wrong").status == 403
    assert ask(server, "/").status == 403  # the header does not open the page
    found = ask(server, "/measure", {"values": desks.constant(desk)}, token="wrong")
    assert found.status == 403 and "wrong token" in found.json["message"]


def _request(method: str, path: str, server: DeskServer, token: str) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nX-Aniso-Token: {token}\r\n\r\n"
    return head.encode()


def test_tokens_differ_and_are_long(desk):
    servers = [DeskServer(desk) for _ in range(3)]
    assert len({one.token for one in servers}) == 3 and min(len(one.token) for one in servers) >= 32
    for one in servers:
        one.release()


def test_it_listens_on_the_loopback_interface_alone(server):
    assert server._http.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "0.0.0.0:{port}", ""])
def test_another_host_name_is_refused(server, host):
    found = ask(server, "/desk", Host=host.format(port=server.port))
    assert found.status == 421
    assert ask(server, "/desk", Host=f"localhost:{server.port}").status == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://127.0.0.1"])
def test_requests_of_other_origins_are_refused(server, origin):
    assert ask(server, "/desk", Origin=origin).status == 403
    assert ask(server, "/desk", Origin=f"http://127.0.0.1:{server.port}").status == 200


def test_requests_that_a_browser_marks_as_foreign_are_refused(server, desk):
    for site in ("cross-site", "same-site", "none"):
        assert ask(server, "/desk", Sec_Fetch_Site=site).status == 403
    assert ask(server, f"/?token={server.token}", Sec_Fetch_Site="cross-site").status == 200  # a link
    found = ask(server, "/desk", method="OPTIONS", Origin="https://evil.example")
    assert found.status == 501 and "Access-Control-Allow-Origin" not in found.headers


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/..%2f..%2fetc/passwd",
        "/%2e%2e/desk",
        "//etc/passwd",
        "/desk/../../etc/passwd",
        "/desk.js",
        "/favicon.ico",
        "/desk/",
        "/\x00",
    ],
)
def test_no_path_names_a_file(server, path):
    found = raw(server, _request("GET", path, server, server.token))
    assert found.startswith((b"HTTP/1.0 404", b"HTTP/1.0 400")), found[:80]
    assert b"root:" not in found


def test_methods_and_bodies_that_do_not_fit_are_refused(server, desk):
    assert ask(server, "/measure", method="GET").status == 405
    assert ask(server, "/desk", b"{}").status == 405
    for body in (b"", b"[]", b"{", b'{"values": 3}', b'{"values": [["x"]]}', b'{"values": [], "more": 1}'):
        assert ask(server, "/measure", body).status == 400, body
    for word in (b"NaN", b"Infinity", b"1e999"):
        assert ask(server, "/measure", b'{"values": [[' + word + b"]]}").status == 400
    assert ask(server, "/measure", b'{"values": [[1]]}').status == 422
    assert ask(server, "/preset", {"name": "../../x"}).status == 422
    assert ask(server, "/measure", b"[" * 100_000).status == 400


def test_large_bodies_are_refused_unread(server):
    head = f"POST /measure HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nX-Aniso-Token: {server.token}\r\n"
    for more, status in (
        ("Content-Length: 999999999999\r\n", b"413"),
        ("Content-Length: 99999999999999999\r\n", b"411"),
        ("Content-Length: -1\r\n", b"411"),
        ("Transfer-Encoding: chunked\r\n", b"411"),
        ("", b"411"),
    ):
        assert raw(server, (head + more + "\r\n").encode()).startswith(b"HTTP/1.0 " + status), more
    head = head.replace("/measure", "/items/image")
    size = f"Content-Length: {LARGEST_IMAGE + 1}\r\n"
    assert raw(server, (head + size + "\r\n").encode()).startswith(b"HTTP/1.0 413")


def test_connections_are_bounded_and_freed(server):
    held = []
    try:
        for _ in range(MOST_CONNECTIONS):
            held.append(socket.create_connection(("127.0.0.1", server.port), timeout=20))
        deadline = time.monotonic() + 10
        refused = b""
        while b"503" not in refused and time.monotonic() < deadline:
            refused = raw(server, _request("GET", "/desk", server, server.token))
        assert refused.startswith(b"HTTP/1.0 503")
    finally:
        for connection in held:
            connection.close()
    deadline = time.monotonic() + 10
    while (status := _status(server)) != 200 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert status == 200


def _status(server: DeskServer) -> int:
    try:
        return ask(server, "/desk").status
    except OSError:
        return 0


def test_hostile_uploads_are_refused_with_a_plain_message(server):
    flat = io.BytesIO()
    Image.new("1", (14_000, 14_000)).save(flat, "PNG")
    found = ask(server, "/items/image", flat.getvalue(), X_Aniso_Name="bomb%1b%5b31m.png")
    assert found.status == 422 and found.json["error"] == "IMAGE-BOMB"
    assert "\x1b" not in found.json["message"]
    found = ask(server, "/items/image", b"no image")
    assert found.status == 422 and found.json["error"] == "IMAGE-READ" and found.json["fix"]
    before = ask(server, "/desk").json["items"]
    found = ask(server, "/items/image", pictures.encoded(2), X_Aniso_Name="../../mine.png")
    assert found.status == 200 and len(found.json["items"]) == len(before) + 1
    number = found.json["items"][-1]["number"]
    assert ask(server, "/items/remove", {"number": number}).json["items"] == before


def test_answers_are_those_of_the_desk(server, desk, tmp_path):
    table = desks.constant(desk, cars=0.4, dtd=-0.2)
    found = ask(server, "/measure", {"values": table}).json
    expected = desk.measure(table)
    for key in ("items", "correct", "done", "total"):
        assert found[key] == json.loads(json.dumps(expected[key]))
    saved = ask(server, "/save", {"values": table})
    assert saved.content == desk.coefficients(table).to_bytes()
    assert saved.headers["Content-Disposition"] == 'attachment; filename="coefficients.safetensors"'
    assert ask(server, "/command", {"values": table}).json == desk.command(table)
    assert ask(server, "/preset", {"name": "mean"}).json["values"] == desk.preset("mean")
    baked = ask(server, "/bake", {"values": table})
    assert baked.status == 422 and "-o DIR" in baked.json["fix"]


def test_an_unexpected_failure_is_a_message_and_no_traceback(server, desk, monkeypatch, capfd):
    monkeypatch.setattr(desk, "geometry", lambda: 1 / 0)
    found = ask(server, "/geometry")
    assert found.status == 500 and b"ZeroDivisionError" not in found.content
    assert "ZeroDivisionError" in capfd.readouterr().err  # the terminal has it


def test_many_requests_at_once_are_all_answered(server, desk):
    tables = [desks.constant(desk, cars=i / 10) for i in range(6)]
    found: dict[int, object] = {}

    def run(i: int) -> None:
        found[i] = ask(server, "/measure", {"values": tables[i]}).json["items"]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(tables))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, table in enumerate(tables):
        assert found[i] == json.loads(json.dumps(desk.measure(table)["items"]))


def test_a_closed_server_frees_its_port(desk):
    with DeskServer(desk).running() as running:
        port = running.port
    again = DeskServer(desk, port)
    assert again.port == port
    again.release()
