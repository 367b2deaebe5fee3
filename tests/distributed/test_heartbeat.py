"""The threads of a heartbeat, with a simulated store."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from whet.distributed import heartbeat
from whet.distributed.heartbeat import Heartbeat, StallDetector


class SimulatedStore:
    """The store of rank 0 of four, whose other ranks send heartbeats from the moment `may_answer` is set."""

    rank, size = 0, 4
    check_lost: Any = None

    def __init__(self) -> None:
        self.may_answer = threading.Event()

    def post(self, name: str, text: str) -> None:
        pass

    def find(self, _name: str) -> None:
        return None

    def find_all(self, names: list[str]) -> list[str]:
        self.may_answer.wait(10)
        return ["1 free" for _ in names]


class SlowDict(dict[int, tuple[str, float]]):
    """A dict over which an iteration pauses after its first item until another thread adds one, at most 0.2 s."""

    def __init__(self, *args: Any, paused: threading.Event) -> None:
        super().__init__(*args)
        self.paused, self.added = paused, threading.Event()

    def __setitem__(self, key: int, value: tuple[str, float]) -> None:
        super().__setitem__(key, value)
        self.added.set()

    def items(self) -> Iterator[Any]:  # type: ignore[override]
        for item in super().items():
            yield item
            self.paused.set()
            self.added.wait(0.2)


def test_ranks_may_be_heard_first_while_silent_ranks_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_SECONDS", 0.01)
    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    store = SimulatedStore()
    beats = Heartbeat(store, StallDetector(is_single_process=False))  # type: ignore[arg-type]
    beats._seen = SlowDict({1: ("0 free", time.monotonic())}, paused=store.may_answer)
    before = set(threading.enumerate())
    beats.start()
    started = set(threading.enumerate()) - before
    deadline = time.monotonic() + 10
    while len(beats._seen) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(beats._seen) == [1, 2, 3]
    beats.leave()
    for thread in started:
        thread.join(10)
    assert not errors, errors[0].exc_value
    assert beats.lost is None
