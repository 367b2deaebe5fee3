"""Step benches in a child process: deaths, hangs and excess memory are reported, and the next probe works."""

import math
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from faulty_step_benches import HANGS_SECONDS
from paths import SUPPORT
from whet.autotune.process_bench import ProcessStepBench
from whet.autotune.step_bench import LaunchFacts, ProbeFailedError
from whet.base import env
from whet.base.errors import UsageError, WhetError

MB = 1024**2
PATIENCE_SECONDS = 120
"""Timeout for calls that return immediately; only a hang takes this long."""


def open_faulty_bench(*, max_bytes: int | None = None, **arguments: object) -> ProcessStepBench:
    environment = env.child_environment(PYTHONPATH=f"{Path(__file__).parent}:{SUPPORT}:{env.read('PYTHONPATH') or ''}")
    return ProcessStepBench("faulty_step_benches:open_bench", arguments, environment=environment, max_bytes=max_bytes)


@pytest.fixture(scope="module")
def bench():
    with open_faulty_bench(max_bytes=400 * MB) as bench:
        yield bench


def test_process_bench_returns_the_results_of_its_child(bench):
    assert bench.plan.workload.recipe == "planted"
    assert bench.predicted_bytes({"micro_batch": 4}) is None
    assert bench.agreement({"precision": "tf32"}, seconds=PATIENCE_SECONDS).agrees
    assert not bench.agreement({"precision": "bf16"}, seconds=PATIENCE_SECONDS).agrees
    prepared = bench.prepare({"misdeed": "prints"}, seconds=PATIENCE_SECONDS)
    assert (prepared.preparation_seconds, prepared.step_seconds) == (0.5, 0.1)
    assert prepared.launches == LaunchFacts(is_captured=False, share=0.34, obstacle="the device is busy")
    assert prepared.step(2) == 2.1
    assert prepared.peak_bytes() == 7
    prepared.close()


@pytest.mark.parametrize(
    ("misdeed", "kind", "words"),
    [
        ("killed", "crash", "SIGKILL"),
        ("aborts", "crash", "SIGABRT"),
        ("hangs", "timeout", "no response after 1.0 s"),
        ("takes too much", "oom", "of 400 MB and was killed"),
        ("out of memory", "oom", "MPS backend out of memory"),
        ("raises", "error", "ValueError: nonsense"),
    ],
)
def test_failed_probe_is_reported_and_the_next_one_works(bench, misdeed, kind, words):
    before = bench.prepare({}, seconds=PATIENCE_SECONDS)
    assert before.step(0) == 0.1
    with pytest.raises(ProbeFailedError) as failed:
        bench.prepare({"misdeed": misdeed}, seconds=1 if misdeed == "hangs" else PATIENCE_SECONDS)
    assert failed.value.kind == kind
    assert words in failed.value.reason
    # Prepared settings are prepared again if their process died.
    assert before.step(1) == 1.1
    before.close()


def test_death_between_steps_is_reported(bench):
    prepared = bench.prepare({"misdeed": "dies later"}, seconds=PATIENCE_SECONDS)
    assert prepared.step(2) == 2.1
    with pytest.raises(ProbeFailedError, match="SIGABRT"):
        prepared.step(3)
    assert prepared.peak_bytes() == 7, "earlier results are kept"
    prepared.close()


def test_stdin_of_a_probe_is_empty(bench):
    assert bench.prepare({"misdeed": "reads stdin"}, seconds=PATIENCE_SECONDS).step(2) == 2.1


def test_children_of_a_probe_end_with_it():
    before = {*psutil.Process().children(recursive=True)}
    with open_faulty_bench() as bench:
        bench.prepare({"misdeed": "forks"}, seconds=PATIENCE_SECONDS)
        _, grandchild = (p for p in psutil.Process().children(recursive=True) if p not in before)
    grandchild.wait(timeout=PATIENCE_SECONDS)
    assert not grandchild.is_running()


@pytest.mark.parametrize(
    ("when", "arguments"), [pytest.param("opening", {"hangs": True}, marks=pytest.mark.slow), ("preparing", {})]
)
def test_hanging_probe_ends_with_its_killed_parent(when, arguments):
    code = (
        "from test_process_bench import HANGS_SECONDS, open_faulty_bench\n"
        f"with open_faulty_bench(**{arguments}) as bench:\n"
        "    bench.prepare({'misdeed': 'hangs'}, seconds=HANGS_SECONDS)\n"
    )
    environment = env.child_environment(PYTHONPATH=f"{Path(__file__).parent}:{SUPPORT}:{env.read('PYTHONPATH') or ''}")
    parent = psutil.Popen([sys.executable, "-c", code], env=environment)
    try:
        child = the_child(parent)
        # Long enough that it hangs; an earlier stop would be the easier case.
        time.sleep(0.5)
    finally:
        parent.kill()
        parent.wait()
    child.wait(timeout=PATIENCE_SECONDS)
    assert not child.is_running()


def test_keyboard_interrupt_ends_the_probe_at_once():
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    started, before = time.monotonic(), psutil.Process().children()
    with pytest.raises(KeyboardInterrupt), open_faulty_bench() as bench:  # noqa: PT012 - whatever is raised first, all is closed
        ready = bench.prepare({}, seconds=PATIENCE_SECONDS)
        try:
            bench.prepare({"misdeed": "hangs"}, seconds=HANGS_SECONDS)
        finally:
            ready.close()
    assert time.monotonic() - started < HANGS_SECONDS / 2
    assert psutil.Process().children() == before


def test_no_wait_exceeds_the_budget():
    with open_faulty_bench() as bench:
        bench.ends_at = bench.clock() + 1
        with pytest.raises(ProbeFailedError) as failed:
            bench.prepare({"misdeed": "hangs"}, seconds=HANGS_SECONDS)
    assert failed.value.kind == "timeout"


def test_a_start_that_the_budget_cuts_off_is_a_timeout():
    with open_faulty_bench() as bench:
        with pytest.raises(ProbeFailedError, match="SIGKILL"):
            bench.prepare({"misdeed": "killed"}, seconds=PATIENCE_SECONDS)
        bench.ends_at = bench.clock()
        with pytest.raises(ProbeFailedError, match="could not start: no response after 0 s") as failed:
            bench.prepare({}, seconds=PATIENCE_SECONDS)
    assert failed.value.kind == "timeout"


def test_infinite_budget_is_valid():
    with open_faulty_bench() as bench:
        bench.ends_at = math.inf
        assert bench.prepare({}, seconds=math.inf).step(2) == 2.1


def the_child(parent: psutil.Process) -> psutil.Process:
    ends_at = time.monotonic() + PATIENCE_SECONDS
    while not (result := parent.children()):
        assert time.monotonic() < ends_at, "no process was started"
        time.sleep(0.05)
    return result[0]


def test_error_of_opening_is_raised_in_the_parent():
    with pytest.raises(WhetError) as refused, open_faulty_bench(refused=True):
        pass
    assert (refused.value.what, refused.value.try_) == ("no such data", "data=FILE")
    assert isinstance(refused.value, UsageError)


def test_death_at_the_start_is_described():
    with pytest.raises(ProbeFailedError, match="could not start"), open_faulty_bench(dies=True):
        pass
