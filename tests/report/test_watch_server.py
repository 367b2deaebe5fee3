"""The server of the live page, as a process next to untrusted runs (G4, G6, G9, G10 and G11)."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amounts import amount
from hostile_names import create_renamed_run
from paths import ReportCount
from web_client import PATIENCE_SECONDS, Served, serving, until
from whet.report.page.html import STATIC_FOLDER
from whet.report.watch.listing import RunListing
from whet.report.watch.status_reader import run_id
from whet.run import lock
from whet.run.events import EventLog
from whet.run.folder import Run, installed_versions
from whet.web.access import ClientLimits

CANARY = "canary-9f2c61"
PAYLOADS = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    '"><script>alert(1)</script>',
    "'-alert(1)-'",
    "</title><script>alert(1)</script>",
    "</textarea><script>alert(1)</script>",
    "<!--<script>",
    "javascript:alert(1)",
    "<a href=javascript:alert(1)>x</a>",
    "<iframe srcdoc='<script>alert(1)</script>'>",
    "<base href=//evil.example>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "{{constructor.constructor('alert(1)')()}}",
    "\x1b[2J\x1b]0;owned\x07",
    "\r\nSet-Cookie: owned=1\r\n\r\n<script>",
    "\n\nevent: run\ndata: owned\n\n",
    "\u202egnp.exe",
    "\x00<script>",
    "%3Cscript%3Ealert(1)%3C/script%3E",
)
ROUTES = (
    "/",
    "/static/watch.js",
    "/api/runs",
    "/api/runs/{id}",
    "/api/runs/{id}/events",
    "/api/compare",
)
DOCUMENTED = {200, 304, 400, 401, 403, 404, 405, 409, 413, 415, 421, 431}


def make(root: Path, name: str, **parts: dict) -> Run:
    logged = {"config": {}, "plan": {}, "machine": {}, "versions": installed_versions()} | parts
    return create_renamed_run(root / name, recipe="text", command=["whet", "train", "text"], **logged)


def train(run: Run | Path, *, steps: int, **end: object) -> None:
    with EventLog(run) as log:
        log.append("start", step=0, total_steps=100, goal="accuracy")
        for step in range(1, steps + 1):
            log.append(
                "step", step=step, loss=1 / step, samples=32 * step, lr=0.1, seconds={"data": 0.1, "forward": 0.2}
            )
        log.append("eval", step=steps, accuracy=0.5)
        if end:
            log.append("end", step=steps, **end)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a good run and many bad ones."""
    base = tmp_path_factory.mktemp("watched")
    outside = base / "outside"
    outside.mkdir()
    (outside / "canary.json").write_text(json.dumps({"secret": CANARY, "kind": "step", "step": 1, "time": 1.0}) + "\n")
    train(make(outside, "elsewhere", config={"secret": CANARY}), steps=2)
    root = base / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        train(make(root, "good"), steps=50, state="done")
        train(make(root, "other", config={"lr": 3}), steps=20, state="failed", reason="no reason")
        for number, payload in enumerate(PAYLOADS):
            name = payload.replace("/", "\u2215").replace("\x00", "\u2400")
            run = make(
                root, name, config={"note": payload, payload: 1}, plan={"settings": {payload: {"value": payload}}}
            )
            with EventLog(run) as log:
                log.append("start", step=0, goal=payload, total_steps=number)
                log.append("step", step=1, loss=float("nan"))
                log.append("eval", step=1, **{payload: 0.5})
                log.append("warning", step=1, reason=payload, words=payload)
                log.append("end", step=1, state=payload, reason=payload)
        train(make(root, os.fsdecode(b"not-utf8-\xff\xfe")), steps=3)
        train(make(root, "%2e%2e%2foutside"), steps=3)
        train(make(root, ".."[:1] + "hidden"), steps=3)
        long = make(root, "long-line")
        with EventLog(long) as log:
            log.append("start", step=0)
            log.append("warning", step=1, reason="w" * 10_000_000)
        endless = make(root, "endless-line")
        (endless.path / "events.jsonl").write_bytes(b"{" * 17_000_000)
    (root / "link").symlink_to(outside / "elsewhere")
    for part in ("events.jsonl", "config.json", "run.json", "plan.json"):
        run = make(root, f"linked-{part}")
        (run.path / part).unlink()
        (run.path / part).symlink_to(outside / "canary.json")
    os.mkfifo(make(root, "pipe").path / "pipe")
    fifo = make(root, "fifo").path / "events.jsonl"
    fifo.unlink()
    os.mkfifo(fifo)
    (make(root, "damaged").path / "config.json").write_text("{" * 100_000)
    return root


@pytest.fixture(scope="module")
def server(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    words = ("-m", "whet", "watch", str(runs), "--port", "0", "--json", "--no-browser")
    before = snapshot(runs)
    with serving(*words, home=tmp_path_factory.mktemp("home"), cwd=runs.parent) as served:
        assert until(lambda: served.request("/api/runs").json()["is_complete"])
        yield served
    assert snapshot(runs) == before, "the server wrote in a run folder"


def snapshot(root: Path) -> dict[str, tuple[int, int, int]]:
    """Every file of the runs that no test changes itself."""
    result = {}
    for path in sorted(root.rglob("*")):
        if "live" not in str(path.relative_to(root)):
            stat = path.lstat()
            result[str(path)] = (stat.st_mtime_ns, stat.st_size, stat.st_ino) if not path.is_dir() else (0, 0, 0)
    return result


def addresses(server: Served) -> list[str]:
    return [route.replace("{id}", run_id("good")) for route in ROUTES]


def test_runs_are_listed_with_their_kind(server: Served, runs: Path) -> None:
    answer = server.request("/api/runs").json()
    lines = {line["name"]: line for line in answer["runs"]}
    assert len(lines) == len(answer["runs"]) == 2 + len(PAYLOADS) + 2 + 2 + 4 + 3
    good = lines["good"]
    assert (good["state"], good["step"], good["total_steps"], good["goal_value"]) == ("done", 50, 100, 0.5)
    assert good["goal_mode"] == "max"
    assert good["loss"] == 1 / 50
    assert good["id"] == run_id("good")
    assert lines["other"]["state"] == "failed"
    assert lines["long-line"]["state"] == "stopped"
    broken = {"endless-line", "fifo", "damaged", *(name for name in lines if name.startswith("linked-"))}
    assert len(broken) == 7
    assert all(lines[name]["state"] == "unreadable" and lines[name]["problem"] for name in broken)
    assert str(runs) not in json.dumps(answer)
    assert CANARY not in json.dumps(answer)


def test_the_api_serves_a_run_its_events_and_a_comparison(server: Served) -> None:
    view = server.request(f"/api/runs/{run_id('good')}")
    assert view.json()["step"] == 50
    tagged = {"If-None-Match": view.headers["etag"]}
    assert server.request(f"/api/runs/{run_id('good')}", headers=tagged).status == 304
    compared = server.request(f"/api/compare?ids={run_id('good')},{run_id('other')}").json()
    assert compared["labels"] == ["good", "other"]
    seen: list[tuple[str, int]] = []
    before = ""
    while True:
        page = server.request(f"/api/runs/{run_id('good')}/events?kinds=step,start,end&limit=7{before}").json()
        seen += [(event["kind"], event["step"]) for event in page["events"]]
        if page["before"] is None:
            break
        before = f"&before={page['before']}"
    assert seen == [("end", 50), *(("step", step) for step in range(50, 0, -1)), ("start", 0)]
    rare = server.request(f"/api/runs/{run_id('good')}/events").json()["events"]
    assert [event["kind"] for event in rare] == ["end", "eval", "start"]


def test_a_damaged_run_is_an_error_of_three_lines_or_shortened(server: Served) -> None:
    for line in server.request("/api/runs").json()["runs"]:
        for path in (f"/api/runs/{line['id']}", f"/api/runs/{line['id']}/events"):
            answer = server.request(path)
            assert answer.status in (200, 400, 409), (line["name"], answer)
            assert (answer.status == 200) or line["state"] == "unreadable" or line["name"].startswith("linked-")
            assert len(answer.body) < 500_000
            assert CANARY.encode() not in answer.body


# G4: arbitrary requests.

WORDS = st.text(max_size=40) | st.sampled_from(
    [
        "",
        "0",
        "-1",
        "1e9",
        "9" * 30,
        "0.0",
        "1.5",
        "%00",
        "null",
        ",".join(["a" * 20] * 20),
        run_id("good"),
        run_id("fifo"),
    ]
)
NAMES = st.sampled_from(["before", "kinds", "limit", "ids", "since", "token", "x", ""])
METHODS = st.sampled_from([*["GET"] * 20, "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "FROB"])
HEADERS = st.dictionaries(
    st.sampled_from(["If-None-Match", "Range", "Accept", "Content-Type", "Cookie", "Upgrade", "Expect", "X"]),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30),
    max_size=3,
)


@pytest.mark.parametrize("route", ROUTES)
def test_no_request_makes_the_server_fail(server: Served, route: str, report_count: ReportCount) -> None:
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    statuses: dict[int, int] = {}

    @settings(max_examples=amount(20, 200), database=None)
    @given(WORDS, st.lists(st.tuples(NAMES, WORDS), max_size=4), METHODS, HEADERS, st.binary(max_size=200))
    def ask(word: str, query: list[tuple[str, str]], method: str, headers: dict[str, str], body: bytes) -> None:
        # Every other request names an existing run; otherwise the route would not be reached.
        ident = run_id("good") if len(word) % 2 else urllib.parse.quote(word, safe="%", errors="replace")
        path = route.replace("{id}", ident) + ("?" + urllib.parse.urlencode(query, errors="replace") if query else "")
        if route == "/static/watch.js" and len(word) % 2:
            path = f"/static/{ident}"
        if route == "/api/compare":
            path += ("&" if query else "?") + f"ids={ident},{run_id('other')}"
        answer = server.request(path, method, headers, body=body)
        statuses[answer.status] = statuses.get(answer.status, 0) + 1
        assert answer.status in DOCUMENTED, answer
        assert b"Traceback" not in answer.body

    ask()
    grown = process.memory_info().rss - before
    assert statuses.get(200), statuses
    assert grown < 50e6
    report_count(
        f"G4: {route}: {sum(statuses.values())} requests, {dict(sorted(statuses.items()))}, {grown / 1e6:+.1f} MB"
    )


# G6: foreign host names.


def wrong_hosts(port: int) -> list[str | None]:
    return [
        "evil.example",
        f"evil.example:{port}",
        f"127.0.0.1.evil.example:{port}",
        f"localhost.evil.example:{port}",
        f"localhost.:{port}",
        f"127.0.0.1.:{port}",
        "localhost",
        "127.0.0.1",
        f"127.0.0.1:{port + 1}",
        f"localhost:{port}0",
        f"[::1]:{port + 1}",
        "[::1]",
        f"[::ffff:127.0.0.1]:{port}",
        f"[0:0:0:0:0:0:0:1]:{port}",
        f"127.1:{port}",
        f"2130706433:{port}",
        f"0.0.0.0:{port}",
        f"user@127.0.0.1:{port}",
        f"127.0.0.1:{port}, evil.example",
        "",
        None,
    ]


def test_a_foreign_host_name_is_refused_on_every_route(server: Served, report_count: ReportCount) -> None:
    methods = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
    kinds: list[tuple[str, dict[str, str]]] = [(method, {}) for method in methods]
    kinds.append(
        (
            "GET",
            {
                "Upgrade": "websocket",
                "Connection": "Upgrade",
                "Sec-WebSocket-Key": "eA==",
                "Sec-WebSocket-Version": "13",
            },
        )
    )
    kinds.append(("GET", {"Accept": "text/event-stream"}))
    count = 0
    # Every fifth in the gate: each name, route and kind of request, but not all of their combinations.
    tried = itertools.product(wrong_hosts(server.port), addresses(server), kinds)
    for host, path, (method, headers) in itertools.islice(tried, 0, None, amount(5, 1)):
        logged = {**headers, **server.bearer}
        answer = server.request_bare(path, method, logged, host=host or " " if host == "" else host)
        # Without a Host header, HTTP requires 400.
        assert answer.status == (400 if host is None else 421), (host, path, method, answer)
        count += 1
    twice = [("Host", f"127.0.0.1:{server.port}"), *server.bearer.items()]
    assert server.request_bare("/", headers=twice).status == 400
    good = [f"localhost:{server.port}", f"127.0.0.1:{server.port}", f"[::1]:{server.port}", f"LOCALHOST:{server.port}"]
    assert all(server.request_bare("/", headers=server.bearer, host=host).status == 200 for host in good)
    report_count(f"G6: {count} requests by {len(wrong_hosts(0))} wrong names refused")


def test_nothing_opens_without_the_key_and_nothing_changes_with_it(server: Served) -> None:
    for path in addresses(server):
        assert server.request_bare(path).status == 401
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"):
            answer = server.request(path, method, {"Content-Type": "application/json"}, body=b"{}")
            assert answer.status == 405
            assert answer.headers["allow"] == "GET, HEAD"
        upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Origin": f"http://127.0.0.1:{server.port}"}
        assert server.request(path, headers=upgrade).status == 400


# G9: paths.


def traversals(runs: Path) -> list[str]:
    """Paths that have escaped other servers, as names of a file, a run and a page of events."""
    ups = ("../", "..%2f", "%2e%2e/", "%2e%2e%2f", "..%252f", "%252e%252e%252f", "..%5c", "..\\", "....//", "..;/")
    ups += ("%c0%ae%c0%ae/", "\uff0e\uff0e/", ".%00./", "..%00/")
    targets = ("outside/canary.json", "outside/elsewhere/config.json", "runs/good/config.json")
    result = [up * depth + target for up in ups for depth in (1, 2, 6) for target in targets]
    place = runs.parent / "outside" / "canary.json"
    beside = os.path.relpath(place, STATIC_FOLDER)
    result += [
        beside,
        beside.replace("/", "%2f"),
        beside.replace(".", "%2e"),
        str(place),
        f"/{place}",
        f"file://{place}",
        urllib.parse.quote(str(place), safe=""),
        f"\\\\?\\{place}",
    ]
    result += ["link/config.json", "link", "linked-config.json", "good/../link/config.json", "linked-events.jsonl"]
    result += [
        f"{run_id('link')}",
        f"{run_id('good')}/../{run_id('link')}",
        f"{run_id('good')}%00",
        run_id("good").upper(),
    ]
    return result


def test_no_path_leads_out_of_the_runs(server: Served, runs: Path, report_count: ReportCount) -> None:
    count = 0
    statuses: set[int] = set()
    for payload in traversals(runs):
        encoded = payload if payload.isascii() and " " not in payload else urllib.parse.quote(payload, safe="/%")
        for path in (f"/static/{encoded}", f"/api/runs/{encoded}", f"/{encoded}"):
            answer = server.request(path)
            assert CANARY.encode() not in answer.body, path
            assert answer.status in (400, 404), (path, answer)
            statuses.add(answer.status)
            count += 1
    for name in (*(f"linked-{part}" for part in ("events.jsonl", "config.json", "run.json", "plan.json")), "link"):
        for path in (f"/api/runs/{run_id(name)}", f"/api/runs/{run_id(name)}/events?kinds=step"):
            assert CANARY.encode() not in server.request(path).body
            count += 1
    assert count > 300
    report_count(f"G9: {count} paths, statuses {sorted(statuses)}, canary served 0 times")


# G10: who can reach it.


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_this_machine_can_reach_it(server: Served, report_count: ReportCount) -> None:
    listening = [
        connection.laddr
        for connection in psutil.Process(server.process.pid).net_connections("inet")
        if connection.status == "LISTEN"
    ]
    assert {address.ip for address in listening} <= {"127.0.0.1", "::1"}
    assert {address.port for address in listening} == {server.port}
    report_count(f"G10: listens on {sorted(address.ip for address in listening)} only")


def test_a_remote_address_warns_and_still_needs_the_key(tmp_path: Path) -> None:
    words = ("-m", "whet", "watch", str(tmp_path), "--port", "0", "--json", "--no-browser", "--address", "0.0.0.0")
    with serving(*words, home=tmp_path / "home", cwd=tmp_path) as served:
        assert any("WARNING" in line for line in served.reported)
        assert served.request_bare("/api/runs").status == 401
        assert served.request_bare("/api/runs", headers=served.bearer, host=f"evil.example:{served.port}").status == 421
        assert served.request("/api/runs").status == 200


# G11: text from a run is escaped.


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[str | None] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.scripts.append(dict(attrs).get("src"))
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "style"]


def test_names_and_logs_are_inert_in_every_answer(server: Served, report_count: ReportCount) -> None:
    listed = server.request("/api/runs")
    names = {line["name"]: line["id"] for line in listed.json()["runs"]}
    checked = [listed]
    for payload in PAYLOADS:
        ident = names[payload.replace("/", "\u2215").replace("\x00", "\u2400")]
        view, events = server.request(f"/api/runs/{ident}"), server.request(f"/api/runs/{ident}/events")
        assert view.json()["provenance"]["config"]["note"] == payload
        assert any(event["fields"].get("reason") == payload for event in events.json()["events"])
        asked = urllib.parse.quote(payload, safe="")
        checked += [
            view,
            events,
            server.request(f"/{asked}"),
            server.request(f"/api/runs/{asked}"),
            server.request(f"/static/{asked}"),
        ]
        checked.append(server.request(f"/api/runs/{ident}/events?before={asked}"))
    for answer in checked:
        assert answer.headers["content-type"] in ("application/json", "text/plain; charset=utf-8")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "set-cookie" not in answer.headers
        assert "\x1b" not in answer.text
    page = server.request("/")
    tags = _Tags()
    tags.feed(page.text)
    assert tags.scripts
    assert all(source and source.startswith("/static/") for source in tags.scripts)
    assert tags.handlers == []
    assert "default-src 'self'" in page.headers["content-security-policy"]
    report_count(
        f"G11: {len(PAYLOADS)} payloads in names, settings and logs: {len(checked)} answers, all plain text or JSON"
    )


@pytest.mark.slow
def test_slow_clients_are_disconnected_at_the_default_deadlines(server: Served, report_count: ReportCount) -> None:
    process, limits, begun = psutil.Process(server.process.pid), ClientLimits(), time.monotonic()
    assert until(lambda: not process.net_connections("tcp")[2:])
    before = process.num_fds()
    slow = [server.connect() for _ in range(500)]
    for connection in slow:
        with contextlib.suppress(OSError):
            connection.sendall(b"GET / HTTP/1.1\r\n")
    assert process.num_fds() < limits.connections + 60
    assert until(lambda: process.num_fds() <= before, seconds=limits.receive_seconds + 10)
    report_count(
        f"G5: 500 slow connections gone after {time.monotonic() - begun:.1f} s (deadline {limits.receive_seconds:g} s)"
    )
    for connection in slow:
        connection.close()


# A run that is being trained.


def test_a_page_gets_only_what_has_changed(server: Served, runs: Path) -> None:
    ident, seen = run_id("live-1"), server.request("/api/runs").json()
    news: dict = {}

    def is_news(**fields: object) -> bool:
        nonlocal seen, news
        seen = server.request(f"/api/runs?since={seen['version']}").json()
        assert {line["id"] for line in seen["runs"]} <= {ident}, "nothing else has changed"
        news = next(iter(seen["runs"]), news)
        return all(news.get(name) == value for name, value in fields.items())

    run = make(runs, "live-1")
    assert until(lambda: is_news(state="never started"))
    with lock.acquire(run.path), EventLog(run, flush_seconds=0) as log:
        log.append("start", step=0, total_steps=9)
        log.append("step", step=1, loss=2.0)
        assert until(lambda: is_news(state="running", total_steps=9))
        first = server.request(f"/api/runs/{ident}")
        log.append("step", step=2, loss=1.5)
        assert until(lambda: is_news(step=2, loss=1.5))
        known = {"If-None-Match": first.headers["etag"]}
        assert until(lambda: server.request(f"/api/runs/{ident}", headers=known).status == 200)
    assert until(lambda: is_news(state="stopped"))
    shutil.rmtree(run.path)
    assert until(lambda: is_news() and seen["removed"] == [ident])


def test_what_a_page_has_is_not_sent_again(server: Served) -> None:
    for path in (f"/api/runs/{run_id('good')}", f"/api/compare?ids={run_id('good')},{run_id('other')}"):
        first = server.request(path)
        again = server.request(path, headers={"If-None-Match": first.headers["etag"]})
        assert (first.status, again.status, again.body) == (200, 304, b"")


def test_a_torn_last_line_is_ignored_until_it_is_complete(server: Served, runs: Path) -> None:
    run = make(runs, "live-torn")
    train(run, steps=3)
    listing = RunListing(run.path)
    assert listing.scan().changed[0].step == 3
    whole = b'{"kind":"step","time":1e9,"step":4,"loss":0.125}\n'
    with (run.path / "events.jsonl").open("ab") as file:
        file.write(whole[:20])
        file.flush()
        assert not listing.scan()
        assert until(lambda: "live-torn" in server.request("/api/runs").text)
        assert server.request(f"/api/runs/{run_id('live-torn')}").json()["step"] == 3
        file.write(whole[20:])
    (line,) = listing.scan().changed
    assert (line.step, line.loss) == (4, 0.125)
    assert until(lambda: server.request(f"/api/runs/{run_id('live-torn')}").json()["step"] == 4)


TRAINING = """
import sys, time
from pathlib import Path
from whet.run import lock
from whet.run.events import EventLog
folder = Path(sys.argv[1])
for life in range(5):
    with lock.acquire(folder), EventLog(folder) as log:
        log.append("resume" if life else "start", step=200 * life, total_steps=1000)
        for step in range(200 * life + 1, 200 * life + 201):
            log.append("step", step=step, loss=1 / step)
            time.sleep(0.002)
        log.append("end", step=step, state="done")
"""


def test_a_run_is_not_affected_by_the_server(tmp_path: Path) -> None:
    """Five processes in turn take the lock of a run while pages watch it and the server is killed."""
    run = make(tmp_path / "runs", "trained")
    words = ("-m", "whet", "watch", str(tmp_path / "runs"), "--port", "0", "--json", "--no-browser")
    with serving(*words, home=tmp_path / "home", cwd=tmp_path) as served:
        assert served.request(f"/api/runs/{run_id('trained')}").status == 200
        training = subprocess.Popen([sys.executable, "-c", TRAINING, str(run.path)])
        for _ in range(30):
            assert served.request(f"/api/runs/{run_id('trained')}").status == 200
        served.process.send_signal(signal.SIGKILL)
        served.process.wait()
        assert training.wait(PATIENCE_SECONDS) == 0
    (line,) = RunListing(tmp_path / "runs").scan(seconds=60).changed
    assert (line.state, line.step, line.total_steps) == ("done", 1000, 1000)


def test_the_server_has_a_low_priority(server: Served) -> None:
    assert psutil.Process(server.process.pid).nice() >= psutil.Process().nice() + 5 or psutil.Process().nice() > 14


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_server_is_idle_without_open_pages(server: Served) -> None:
    process = psutil.Process(server.process.pid)
    assert server.request("/api/runs").status == 200

    def is_asleep() -> bool:
        before = process.num_ctx_switches().voluntary
        time.sleep(1.5)
        return process.num_ctx_switches().voluntary == before

    assert until(is_asleep)


def test_a_search_below_the_runs_is_listed(server: Served, runs: Path) -> None:
    trial = make(runs / "live-search", "trial-0")
    assert until(lambda: server.request("/api/runs").json()["groups"] == [{"name": "live-search", "number": 1}])
    shutil.rmtree(trial.path.parent)
    assert until(lambda: server.request("/api/runs").json()["groups"] == [])


def test_a_second_watch_gives_a_new_link_to_the_first(server: Served, runs: Path) -> None:
    home = Path(psutil.Process(server.process.pid).environ()["WHET_HOME"])
    words = [sys.executable, "-m", "whet", "watch", str(runs), "--no-browser", "--json"]
    done = subprocess.run(
        words, env={**os.environ, "WHET_HOME": str(home)}, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    logged = json.loads(done.stdout)
    assert (logged["is_new"], logged["pid"]) == (False, server.process.pid)
    with socket.create_connection(("127.0.0.1", server.port)):
        cookie = server.cookie(logged["link"])
    assert server.request_bare("/api/runs", headers={"Cookie": cookie}).status == 200
