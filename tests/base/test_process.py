"""Time limits that interrupt Python code, and the names of signals."""

import gc
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from whet.base.process import (
    TimeLimitError,
    describe_exit_code,
    gc_disabled,
    interrupt_after,
    interrupt_obstacle,
    signal_name,
)

FAR = 600.0
"""Seconds that only a limit without effect takes."""


@pytest.fixture(autouse=True)
def _no_alarm_is_left():
    before = signal.getsignal(signal.SIGALRM)
    yield
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_signals_without_a_name_are_numbered():
    """Real-time signals have no names in Python, except the first and the last."""
    unnamed = max(signal.valid_signals()) - 1
    assert (signal_name(signal.SIGTERM), signal_name(unnamed)) == ("SIGTERM", f"signal {unnamed}")
    assert [describe_exit_code(code) for code in (3, -9, -unnamed)] == [
        "exit code 3",
        "killed by SIGKILL",
        f"killed by signal {unnamed}",
    ]


def test_body_that_ends_in_time_is_not_interrupted():
    with interrupt_after(FAR):
        time.sleep(0.01)


def compute():
    end = time.monotonic() + FAR
    while time.monotonic() < end:
        pass


def catch_everything():
    try:
        time.sleep(FAR)
    except Exception:
        pytest.fail("a library would continue")


@pytest.mark.parametrize("work", [compute, lambda: time.sleep(FAR), threading.Event().wait, catch_everything])
def test_limit_interrupts(work):
    with pytest.raises(TimeLimitError), interrupt_after(0.05):
        work()


def test_alarm_repeats_where_python_drops_an_exception(monkeypatch):
    """An exception in a destructor is only printed."""
    monkeypatch.setattr("whet.base.process._REPEAT_SECONDS", 0.05)
    dropped = []
    monkeypatch.setattr("sys.unraisablehook", dropped.append)

    class Slow:
        def __del__(self):
            time.sleep(FAR)

    def work():
        Slow()
        time.sleep(FAR)

    with pytest.raises(TimeLimitError), interrupt_after(0.05):
        work()
    assert [error.exc_type for error in dropped] == [TimeLimitError]


def test_limit_is_refused_where_it_would_not_work(monkeypatch):
    assert interrupt_obstacle() is None
    with ThreadPoolExecutor() as pool:
        assert pool.submit(interrupt_obstacle).result() == "only the main thread can be interrupted"
    signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        assert interrupt_obstacle() == "this program uses SIGALRM itself"
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, FAR)
    try:
        assert interrupt_obstacle() == "this program uses SIGALRM itself"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_objects_stay_frozen_until_the_outermost_context_ends():
    count = gc.get_freeze_count()
    with gc_disabled():
        with gc_disabled():
            pass
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    assert gc.isenabled()
    assert (gc.get_freeze_count() > 0) is (count > 0)
