"""The guard of every server: keys, origins, limits and deadlines (G5, G7 and G8 of the reliability facts)."""

import asyncio
import contextlib
import http.client
import itertools
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from guarded_server import LIMITS, PATHS, SECRET
from paths import SUPPORT, ReportCount, Run
from web_client import PATIENCE_SECONDS, Answer, Served, exchange, serving, until
from whet.base.errors import UsageError, WhetError
from whet.base.extras import install_hint
from whet.web import access
from whet.web.access import ServerKey
from whet.web.guard import RequestGuard
from whet.web.registry import find_server, private_folder
from whet.web.server import listen, serve

MARGIN = 60
"""File descriptors besides counted connections: the process's own, and some that wait to be counted or closed."""
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Served]:
    with serving(str(SUPPORT / "guarded_server.py"), home=home, cwd=home) as served:
        yield served


def num_changes(server: Served) -> int:
    return server.request().json()["changes"]


def is_three_lines(answer: Answer) -> bool:
    lines = answer.text.rstrip("\n").split("\n")
    logged = [line[:7] for line in lines[1:]]
    kind = answer.headers["content-type"] == "text/plain; charset=utf-8"
    return kind and logged in (["  got: ", "  try: "], ["  got: "], ["  try: "])


def test_every_response_has_the_security_headers(server: Served) -> None:
    for path in (*PATHS, "/nowhere"):
        for method in ("GET", "HEAD", "DELETE"):
            if (path, method) in (("/flood", "GET"), ("/large", "GET")):
                continue
            answer = server.request(path, method)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'self'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["cache-control"] == "no-store"
            assert "server" not in answer.headers
            assert not any(name.startswith("access-control") for name in answer.headers)


def test_details_of_a_failure_are_printed_to_the_terminal_only(server: Served) -> None:
    answer = server.request("/fail")
    assert answer.status == 500
    assert is_three_lines(answer)
    assert SECRET not in answer.text
    assert "Traceback" not in answer.text
    assert until(lambda: f"failed: {SECRET}\n" in server.reported)


def test_an_error_of_a_handler_has_no_control_characters(server: Served) -> None:
    answer = server.request("/refuse")
    assert answer.status == 404
    assert answer.text == "no such thing\n  got: <b> [2J\n  try: another\n"
    assert answer.headers["content-type"].startswith("text/plain")


def test_errors_are_three_lines_everywhere(server: Served) -> None:
    answers = {
        404: server.request("/nowhere"),
        405: server.request("/", "POST", JSON, body=b"{}"),
        401: server.request_bare("/"),
        421: server.request_bare("/", host="evil.example"),
        413: server.request("/change", "POST", JSON, body=b"1" * 1001),
        415: server.request("/change", "POST", body=b"{}"),
        400: server.request("http://evil.example/"),
        431: server.request("/", headers=[(f"X-{number}", "1") for number in range(80)]),
    }
    for status, answer in answers.items():
        assert answer.status == status
        assert is_three_lines(answer), answer


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n",
    ],
    ids=["noise", "no path", "no host", "two hosts"],
)
def test_invalid_http_is_refused(server: Served, data: bytes) -> None:
    with server.connect() as connection:
        answer = exchange(connection, data)
    assert answer.status == 400
    assert is_three_lines(answer)


def test_a_header_without_end_is_refused(server: Served) -> None:
    with server.connect() as connection:
        answer = exchange(connection, b"GET / HTTP/1.1\r\nX: " + b"x" * (LIMITS.header_bytes + 100))
    assert answer.status == 400


def test_a_chunked_body_is_limited(server: Served) -> None:
    before = num_changes(server)
    head = f"POST /change HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {server.token}\r\n"
    head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    piece = b"190\r\n" + b"1" * 400 + b"\r\n"
    with server.connect() as connection:
        answer = exchange(connection, head.encode() + 3 * piece + b"0\r\n\r\n", method="POST")
    assert answer.status == 413
    assert num_changes(server) == before


# G7: other pages in the same browser.

OTHERS = (
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://localhost:1"},
    {"Origin": "https://127.0.0.1:PORT"},
    {"Origin": "http://127.0.0.1:PORT.evil.example"},
    {"Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
    {"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:PORT"},
)
OURS = ({"Origin": "http://127.0.0.1:PORT"}, {"Sec-Fetch-Site": "same-origin"})
KINDS = ("application/json", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "")


def test_cross_origin_requests_are_refused(server: Served, home: Path, report_count: ReportCount) -> None:
    cookie = {"Cookie": server.cookie(fresh_link(server, home))}
    before = num_changes(server)
    num_refused = 0
    for path, method, headers, kind in itertools.product(PATHS, ("GET", "POST"), OTHERS, KINDS):
        logged = {name: value.replace("PORT", str(server.port)) for name, value in headers.items()}
        if kind:
            logged["Content-Type"] = kind
        answer = server.request_bare(path, method, {**logged, **cookie}, body=b"{}" if method == "POST" else b"")
        assert answer.status == 403, (path, method, logged, answer)
        assert not any(name.startswith("access-control") for name in answer.headers)
        num_refused += 1
    assert num_changes(server) == before
    report_count(f"G7: {num_refused} requests of other pages refused, 0 changes")


def test_a_change_needs_key_origin_and_json_together(server: Served, home: Path, report_count: ReportCount) -> None:
    cookie = {"Cookie": server.cookie(fresh_link(server, home))}
    before, made, num_refused = num_changes(server), 0, 0
    keys = ({}, cookie, server.bearer, {"Authorization": "Bearer wrong"}, {"Cookie": f"whet-{server.port}=wrong"})
    for secret, origin, kind in itertools.product(keys, ({}, *OURS), KINDS):
        logged = {name: value.replace("PORT", str(server.port)) for name, value in origin.items()}
        if kind:
            logged["Content-Type"] = kind
        is_fine = kind == "application/json" and (secret is server.bearer or (secret is cookie and bool(origin)))
        is_fine = is_fine or (kind == "application/json" and secret == server.bearer)
        answer = server.request_bare("/change", "POST", {**logged, **secret}, body=b"{}")
        assert (answer.status == 200) == is_fine, (secret, origin, kind, answer)
        made += is_fine
        num_refused += not is_fine
    assert num_changes(server) == before + made
    assert made == 5
    report_count(f"G7: {made} changes made, {num_refused} refused")


def test_reading_changes_nothing(server: Served) -> None:
    before = num_changes(server)
    for path in ("/", "/change", "/refuse", "/fail"):
        for method in ("GET", "HEAD", "OPTIONS", "TRACE", "PUT", "PATCH", "DELETE", "CONNECT", "FROB"):
            assert server.request(path, method, JSON).status in (200, 400, 404, 405, 500)
    assert num_changes(server) == before


def test_navigation_from_another_site_is_allowed(server: Served, home: Path) -> None:
    """Such a page is shown to the user only; without a valid ticket it is refused."""
    from_elsewhere = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    path = fresh_link(server, home).removeprefix(f"http://127.0.0.1:{server.port}")
    assert server.request_bare("/", headers=from_elsewhere).status == 401
    assert server.request_bare(path, headers=from_elsewhere).status == 200


def test_a_websocket_is_guarded_too() -> None:
    """No server has WebSockets yet; the guard supports them in advance."""
    reached: list[str] = []

    async def app(scope, receive, send) -> None:
        reached.append(scope["path"])

    guard = RequestGuard(app, key=(key := ServerKey()), hosts={"127.0.0.1:80"})

    def ask(**headers: str) -> list[dict]:
        sent: list[dict] = []

        async def send(message) -> None:
            sent.append(message)

        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "websocket", "path": "/x", "query_string": b"", "headers": pairs}
        asyncio.run(guard(scope, lambda: None, send))
        return sent

    host, cookie = "127.0.0.1:80", f"whet-80={key.cookie}"
    refused = [{"type": "websocket.close", "code": 1008}]
    assert ask(host="evil:80", origin="http://127.0.0.1:80", cookie=cookie) == refused
    assert ask(host=host, origin="http://evil", cookie=cookie) == refused
    assert ask(host=host, origin="http://127.0.0.1:80") == refused
    assert ask(host=host, cookie=cookie) == refused
    assert reached == []
    assert ask(host=host, origin="http://127.0.0.1:80", cookie=cookie) == []
    assert reached == ["/x"]


# G8: the token.


def fresh_link(server: Served, home: Path) -> str:
    return f"http://127.0.0.1:{server.port}/?token={ServerKey(server.token).ticket()}"


def test_a_link_opens_once_and_gives_a_cookie_that_scripts_and_other_sites_do_not_get(
    server: Served, home: Path
) -> None:
    path = fresh_link(server, home).removeprefix(f"http://127.0.0.1:{server.port}")
    assert server.request_bare(path, "HEAD").status == 401
    assert server.request_bare(path, headers={"Sec-Purpose": "prefetch"}).status == 401
    first, second = server.request_bare(path), server.request_bare(path)
    assert (first.status, second.status) == (200, 401)
    assert "set-cookie" not in second.headers
    name, *flags = first.headers["set-cookie"].split("; ")
    assert set(flags) == {"Path=/", "HttpOnly", "SameSite=Strict"}
    assert server.token not in name
    assert server.token not in path
    assert server.request_bare("/", headers={"Cookie": f"other=1; {name}"}).status == 200
    assert server.request_bare(path, headers={"Cookie": name}).status == 200
    assert server.request_bare("/", headers={"Cookie": f"{name}0"}).status == 401
    assert server.request_bare("/", headers={"Cookie": name.replace("whet-", "whet-1")}).status == 401


def test_neither_cookie_nor_ticket_is_a_token(server: Served, home: Path) -> None:
    cookie = server.cookie(fresh_link(server, home)).partition("=")[2]
    for secret in (
        cookie,
        ServerKey(server.token).ticket(),
        "",
        " ",
        server.token[:-1],
        server.token + "=",
        "\x00",
        "é",
    ):
        assert server.request_bare("/", headers={"Authorization": f"Bearer {secret}"}).status in (400, 401)
    assert server.request_bare("/", headers={"Authorization": f"Basic {server.token}"}).status == 401
    assert server.request_bare(f"/?token={server.token}").status == 401
    assert server.request_bare("/", headers=[*server.bearer.items(), ("Authorization", "Bearer x")]).status == 401


def test_secrets_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(access.hmac, "compare_digest", lambda one, other: bool(compared.append((one, other))))
    key = ServerKey("a")
    assert [key.is_token("a"), key.is_cookie(key.cookie), key.spend(key.ticket())] == [False] * 3
    assert len(compared) == 3


def test_the_token_is_in_no_log_and_no_argument(server: Served, home: Path) -> None:
    server.request("/fail")
    server.request(f"/nowhere?{server.token}")
    server.request_bare("/", headers={"Authorization": f"Bearer {server.token}x"})
    files = list((home / "servers").iterdir())
    assert files
    assert stat.S_IMODE((home / "servers").stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    words = Path(f"/proc/{server.process.pid}/cmdline").read_bytes() if sys.platform == "linux" else b""
    environment = Path(f"/proc/{server.process.pid}/environ").read_bytes() if sys.platform == "linux" else b""
    assert server.token.encode() not in words + environment
    assert not any(server.token in line for line in server.reported)


def test_a_browser_is_started_without_the_link_in_its_arguments(tmp_path: Path) -> None:
    logged = tmp_path / "logged"
    browser = tmp_path / "browser"
    browser.write_text(
        f'#!/bin/sh\necho "$@" > {logged}.new\ncp "${{1#file://}}" {logged}.page\nmv {logged}.new {logged}\n'
    )
    browser.chmod(0o755)
    words = ("-m", "whet", "watch", str(tmp_path), "--port", "0", "--json")
    home = tmp_path / "home"
    with serving(*words, home=home, cwd=tmp_path, BROWSER=f"{browser} %s") as served:
        assert until(logged.exists)
        page = Path(logged.read_text().strip().removeprefix("file://"))
        assert stat.S_IMODE(page.stat().st_mode) == 0o600
        assert "token" not in logged.read_text()
        link = Path(f"{logged}.page").read_text().partition("url=")[2].partition('"')[0]
        assert served.request_bare(link.removeprefix(f"http://127.0.0.1:{served.port}")).status == 200
    assert served.process.returncode == 143
    assert list((home / "servers").iterdir()) == []


def test_another_command_finds_the_server_and_removes_dead_ones(home: Path, server: Served, monkeypatch) -> None:
    monkeypatch.setenv("WHET_HOME", str(home))
    result = find_server(name="guarded", about="a test")
    assert result is not None
    assert result.link().startswith(f"http://127.0.0.1:{server.port}/?token=")
    assert f"{result}" == f"{result!r}" == f"RunningServer(guarded on 127.0.0.1:{server.port})", "without the token"
    dead = private_folder() / "guarded-0-dead.json"
    dead.write_text(result.model_copy(update={"pid": 2**22 + 5, "about": "dead"}).model_dump_json())
    assert find_server(name="guarded", about="dead") is None
    assert not dead.exists()
    # On Linux, the start time of a process changes when the clock is set.
    began = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: began(process) + 3600)
    assert find_server(name="guarded", about="a test") == result


def test_a_folder_for_tokens_that_others_can_read_is_closed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHET_HOME", str(tmp_path))
    (tmp_path / "servers").mkdir(mode=0o755)
    assert stat.S_IMODE(private_folder().stat().st_mode) == 0o700
    (tmp_path / "servers").rmdir()
    (tmp_path / "servers").symlink_to("/tmp")
    with pytest.raises(WhetError, match="must belong to you"):
        private_folder()


# G5: slow clients.


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param((12, 12, 12, 8, 4), id="some", marks=pytest.mark.slow),
        pytest.param((200, 100, 140, 8, 4), id="more than fit"),
    ],
)
def test_slow_clients_are_disconnected_while_others_are_served(
    server: Served, counts: tuple[int, ...], report_count: ReportCount
) -> None:
    head = f"Host: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {server.token}\r\n"
    posted = "Content-Type: application/json\r\nContent-Length: 900\r\n"
    beginnings = {
        "slow header": "GET / HTTP/1.1\r\n",
        "slow body": f"POST /change HTTP/1.1\r\n{head}{posted}\r\n",
        "silent": "",
        "deaf": f"GET /large HTTP/1.1\r\n{head}\r\n",
        "deaf to a stream": f"GET /flood HTTP/1.1\r\n{head}\r\n",
    }
    process = psutil.Process(server.process.pid)
    assert until(lambda: not process.net_connections("tcp")[2:]), "connections of an earlier test"
    before, begun = process.num_fds(), time.monotonic()
    attackers: list[tuple[str, socket.socket]] = []
    files, healthy = 0, []
    for (name, beginning), count in zip(beginnings.items(), counts, strict=True):
        for _ in range(count):
            connection = server.connect()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(beginning.encode())
            attackers.append((name, connection))
        files = max(files, process.num_fds())
        healthy += [healthy_seconds(server) for _ in range(10)]

    def are_gone() -> bool:
        """Send one more byte on each slow connection, which must not extend its deadline."""
        for name, connection in attackers:
            if name.startswith("slow"):
                with contextlib.suppress(OSError):
                    connection.send(b"X")
        healthy.append(healthy_seconds(server))
        return process.num_fds() <= before

    longest = max(LIMITS.receive_seconds, LIMITS.stall_seconds)
    assert until(are_gone, seconds=longest + 10), f"{process.num_fds()} files, {before} before"
    closed = time.monotonic() - begun
    for _, connection in attackers:
        connection.close()
    assert files < LIMITS.connections + MARGIN
    healthy.sort()
    report_count(
        f"G5: {len(attackers)} slow, silent and deaf connections gone after {closed:.1f} s (deadline {longest} s), "
        f"{files} files at most; {len(healthy)} healthy requests meanwhile, p99 "
        f"{1000 * healthy[int(0.99 * len(healthy))]:.0f} ms"
    )


def healthy_seconds(server: Served) -> float:
    begun = time.monotonic()
    assert server.request().status == 200
    return time.monotonic() - begun


def test_a_thousand_connections_at_once_leave_the_server_alive(server: Served, report_count: ReportCount) -> None:
    open_ones = []
    try:
        open_ones += [server.connect() for _ in range(1000)]
        files = psutil.Process(server.process.pid).num_fds()
        assert files < LIMITS.connections + MARGIN
        assert server.request().status == 200
    finally:
        for connection in open_ones:
            connection.close()
    report_count(f"G5: 1000 connections, {files} files")


def test_a_quick_client_keeps_its_connection_between_requests_and_during_a_stream(server: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_SECONDS)
    for _ in range(5):
        connection.request("GET", "/", headers=server.bearer)
        assert connection.getresponse().read()
        time.sleep(LIMITS.receive_seconds / 4)
    other = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_SECONDS)
    other.request("GET", "/stream", headers=server.bearer)
    stream = other.getresponse()
    end = time.monotonic() + 2.5 * max(LIMITS.receive_seconds, LIMITS.stall_seconds)
    while time.monotonic() < end:
        assert stream.read1(100)
    connection.close()
    other.close()


# Listening addresses.


def test_a_port_in_use_is_skipped() -> None:
    with contextlib.closing(listen(0)) as first, contextlib.closing(listen(first.port)) as second:
        assert second.port > first.port
        assert {f"localhost:{first.port}", f"127.0.0.1:{first.port}", f"[::1]:{first.port}"} == first.hosts


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_a_remote_address_needs_permission(address: str) -> None:
    with pytest.raises(UsageError, match="reachable from other machines"):
        serve([], name="x", about="", port=0, address=address, on_ready=lambda server: pytest.fail("it listens"))


@pytest.mark.parametrize(("address", "port"), [("example.com", 0), ("", 0), ("127.0.0.1", 70000), ("127.0.0.1", -1)])
def test_an_invalid_address_is_refused(address: str, port: int) -> None:
    with pytest.raises(UsageError):
        listen(port, address=address)


def test_without_the_extra_the_error_says_what_to_install(whet: Run, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "uvicorn.py").write_text("raise ImportError('No module named uvicorn')\n")
    path = os.pathsep.join([str(tmp_path / "none"), *sys.path])
    done = whet("watch", "--no-browser", PYTHONPATH=path)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "runs does not exist yet: runs appear as they start",
        "error: the server needs two more packages",
        "  got: No module named uvicorn",
        f"  try: {install_hint('web')}",
    ]


def test_ctrl_c_ends_it_in_order(tmp_path: Path) -> None:
    words = ("-m", "whet", "watch", str(tmp_path), "--port", "0", "--json", "--no-browser")
    with serving(*words, home=tmp_path / "home", cwd=tmp_path) as served, served.connect() as connection:
        head = f"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\n"
        connection.sendall(f"{head}Authorization: Bearer {served.token}\r\n\r\n".encode())
        assert b"200 OK" in connection.recv(10_000)
        served.process.send_signal(2)
        assert served.process.wait(PATIENCE_SECONDS) == 0
    assert list((tmp_path / "home" / "servers").iterdir()) == []
