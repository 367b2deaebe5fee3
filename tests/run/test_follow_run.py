"""Following a live run: existing events, new events, and a writer that dies."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from whet.run.event import Event
from whet.run.events import EventLog
from whet.run.folder import EVENTS_FILE
from whet.run.follow import PROCESS_DIED
from whet.run.follow import follow as follow_batches
from whet.run.lock import acquire

POLL = 0.01


@pytest.fixture(autouse=True, scope="module")
def _waits_for_no_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def _never_waits_for_ever() -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise TimeoutError("the follower missed its event")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def follow(folder: Path, **options: Any) -> Iterator[Event]:
    return itertools.chain.from_iterable(follow_batches(folder, **options))


def take(events: Iterator[Event], count: int) -> list[tuple[str, int]]:
    return [(event.kind, event.step) for event in itertools.islice(events, count)]


def test_existing_events_then_new_ones_until_the_end(tmp_path: Path) -> None:
    with acquire(tmp_path), EventLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.append("step", step=step, loss=1.0)
        log.append("resume", step=2)
        log.flush()
        events = follow(tmp_path, poll_seconds=POLL)
        assert [next(events).step for _ in range(3)] == [1, 2, 2]  # Two steps that count, and the resume.
        log.append("step", step=3, loss=1.0)
        log.flush()
        assert next(events).step == 3
        log.append("end", step=3, state="done")
        assert [event.kind for event in events] == ["end"]


def test_a_torn_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    with acquire(tmp_path), (tmp_path / EVENTS_FILE).open("ab", buffering=0) as file:
        stop = threading.Event()
        events = follow(tmp_path, poll_seconds=POLL, stop=stop)
        file.write(b'{"kind":"step","time":1,"step":1}\n{"kind":"st')
        assert next(events).step == 1
        threading.Timer(0.05, lambda: file.write(b'ep","time":2,"step":2}\n')).start()
        assert next(events).step == 2


def test_a_torn_end_that_a_resume_truncates_is_never_seen(tmp_path: Path) -> None:
    (tmp_path / EVENTS_FILE).write_bytes(b'{"kind":"step","time":1,"step":1}\n{"kind":"step","time":1,"st')
    events = follow(tmp_path, poll_seconds=POLL)
    assert next(events).step == 1
    with acquire(tmp_path), EventLog(tmp_path) as log:
        log.append("resume", step=1)
        log.append("end", step=1)
        assert [(e.kind, e.step) for e in events] == [("resume", 1), ("end", 1)]


def test_the_file_may_appear_later(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def appear() -> None:
        folder.mkdir()
        with EventLog(folder) as log:
            log.append("start", step=0)
            log.append("end", step=0)

    threading.Timer(0.05, appear).start()
    assert take(follow(folder, poll_seconds=POLL), 9) == [("start", 0), ("end", 0)]


def test_an_end_that_was_followed_by_a_resume_is_not_the_end(tmp_path: Path) -> None:
    with acquire(tmp_path), EventLog(tmp_path) as log:
        log.append("step", step=1, loss=1.0)
        log.append("end", step=1)
        log.append("resume", step=1)
        events = follow(tmp_path, poll_seconds=POLL)
        assert take(events, 3) == [("step", 1), ("end", 1), ("resume", 1)]


def test_stop_ends_the_waiting_at_once(tmp_path: Path) -> None:
    stop = threading.Event()
    threading.Timer(0.05, stop.set).start()
    began = time.monotonic()
    assert list(follow(tmp_path, poll_seconds=30.0, stop=stop)) == []
    assert time.monotonic() - began < 5


def test_a_replaced_file_is_followed_from_its_beginning(tmp_path: Path) -> None:
    with EventLog(tmp_path) as log:
        log.append("step", step=1, loss=1.0)
        log.append("oom", step=1)
    with acquire(tmp_path):
        events = follow(tmp_path, poll_seconds=POLL)
        assert [next(events).kind for _ in range(2)] == ["step", "oom"]
        (tmp_path / "new").write_bytes(b'{"kind":"start","time":1,"step":0}\n{"kind":"end","time":1,"step":0}\n' * 9)
        (tmp_path / "new").replace(tmp_path / EVENTS_FILE)
        assert [e.kind for e in events] == ["start", "end"] * 9


def test_a_truncated_and_regrown_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    with EventLog(tmp_path) as log:
        for step in range(1, 4):
            log.append("step", step=step, loss=0.5)
    with acquire(tmp_path):
        events = follow(tmp_path, poll_seconds=POLL)
        assert [next(events).step for _ in range(3)] == [1, 2, 3]
        lines = (tmp_path / EVENTS_FILE).read_bytes().splitlines(keepends=True)
        with (tmp_path / EVENTS_FILE).open("r+b") as file:
            file.truncate(len(lines[0]))
            file.seek(0, 2)
            file.write(b'{"kind":"resume","time":1.0,"step":1,"why":"' + b"x" * 999 + b'"}\n')
            file.write(b'{"kind":"end","time":1,"step":1}\n')
        assert [(e.kind, e.step) for e in events] == [("step", 1), ("resume", 1), ("end", 1)]


WRITER = """
import sys, time
from pathlib import Path
from whet.run.events import EventLog
from whet.run.lock import acquire
with acquire(Path(sys.argv[1])), EventLog(Path(sys.argv[1])) as log:
    log.append("start", step=0)
    log.append("checkpoint", step=7)
    time.sleep(60)
"""


def test_a_dead_writer_is_reported_once_and_a_resume_is_seen(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)])
    events = follow(tmp_path, poll_seconds=POLL)
    assert [next(events).kind for _ in range(2)] == ["start", "checkpoint"]
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    gone = next(events)
    assert (gone.kind, gone.step) == (PROCESS_DIED, 7)

    def resume() -> None:
        with acquire(tmp_path), EventLog(tmp_path) as log:
            log.append("resume", step=7)
            log.append("end", step=7)

    threading.Timer(0.2, resume).start()
    assert [e.kind for e in events] == ["resume", "end"]
