"""A probe in a process of its own that dies, hangs or takes too much is reported, and what comes after it works."""

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
from whet.autotune.step_bench import ProbeFailedError
from whet.base import env
from whet.base.errors import UsageError, WhetError

MB = 1024**2
PATIENCE_SECONDS = 120
"""For what happens at once: only a hang takes so long."""


def a_rig(*, max_bytes: int | None = None, **arguments: object) -> ProcessStepBench:
    environment = env.child_environment(PYTHONPATH=f"{Path(__file__).parent}:{SUPPORT}:{env.read('PYTHONPATH') or ''}")
    return ProcessStepBench("faulty_step_benches:open_bench", arguments, environment=environment, max_bytes=max_bytes)


@pytest.fixture(scope="module")
def rig():
    with a_rig(max_bytes=400 * MB) as rig:
        yield rig


def test_a_remote_rig_answers_as_the_rig_in_the_child_does(rig):
    assert rig.plan.workload.recipe == "planted"
    assert rig.predicted_bytes({"micro_batch": 4}) is None
    assert rig.agreement({"precision": "tf32"}, seconds=PATIENCE_SECONDS).agrees
    assert not rig.agreement({"precision": "bf16"}, seconds=PATIENCE_SECONDS).agrees
    prepared = rig.prepare({"misdeed": "prints"}, seconds=PATIENCE_SECONDS)
    assert (prepared.preparation_seconds, prepared.step_seconds) == (0.5, 0.1)
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
def test_a_probe_that_goes_wrong_is_reported_and_the_next_one_works(rig, misdeed, kind, words):
    before = rig.prepare({}, seconds=PATIENCE_SECONDS)
    assert before.step(0) == 0.1
    with pytest.raises(ProbeFailedError) as failed:
        rig.prepare({"misdeed": misdeed}, seconds=1 if misdeed == "hangs" else PATIENCE_SECONDS)
    assert failed.value.kind == kind
    assert words in failed.value.reason
    # What was ready before is made ready again if its process is gone.
    assert before.step(1) == 1.1
    before.close()


def test_a_process_that_dies_between_steps_is_reported_too(rig):
    prepared = rig.prepare({"misdeed": "dies later"}, seconds=PATIENCE_SECONDS)
    assert prepared.step(2) == 2.1
    with pytest.raises(ProbeFailedError, match="SIGABRT"):
        prepared.step(3)
    assert prepared.peak_bytes() == 7, "what is known stays known"
    prepared.close()


def test_what_a_probe_reads_from_stdin_is_not_our_questions(rig):
    assert rig.prepare({"misdeed": "reads stdin"}, seconds=PATIENCE_SECONDS).step(2) == 2.1


def test_what_a_probe_has_started_ends_with_it():
    before = {*psutil.Process().children(recursive=True)}
    with a_rig() as rig:
        rig.prepare({"misdeed": "forks"}, seconds=PATIENCE_SECONDS)
        _, grandchild = (p for p in psutil.Process().children(recursive=True) if p not in before)
    grandchild.wait(timeout=PATIENCE_SECONDS)
    assert not grandchild.is_running()


@pytest.mark.parametrize(("when", "arguments"), [("opening", {"hangs": True}), ("preparing", {})])
def test_a_probe_that_hangs_ends_with_its_parent_however_that_ends(when, arguments):
    code = (
        "from test_process_bench import HANGS_SECONDS, a_rig\n"
        f"with a_rig(**{arguments}) as rig:\n"
        "    rig.prepare({'misdeed': 'hangs'}, seconds=HANGS_SECONDS)\n"
    )
    environment = env.child_environment(PYTHONPATH=f"{Path(__file__).parent}:{SUPPORT}:{env.read('PYTHONPATH') or ''}")
    parent = psutil.Popen([sys.executable, "-c", code], env=environment)
    try:
        child = the_child(parent)
        # Long enough for it to be hanging; sooner would be the easier case.
        time.sleep(0.5)
    finally:
        parent.kill()
        parent.wait()
    child.wait(timeout=PATIENCE_SECONDS)
    assert not child.is_running()


def test_an_interrupt_is_not_kept_waiting_and_ends_the_probe():
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    started, before = time.monotonic(), psutil.Process().children()
    with pytest.raises(KeyboardInterrupt), a_rig() as rig:  # noqa: PT012 - whatever is raised first, all is closed
        ready = rig.prepare({}, seconds=PATIENCE_SECONDS)
        try:
            rig.prepare({"misdeed": "hangs"}, seconds=HANGS_SECONDS)
        finally:
            ready.close()
    assert time.monotonic() - started < HANGS_SECONDS / 2
    assert psutil.Process().children() == before


def test_nothing_is_waited_for_much_longer_than_the_budget():
    with a_rig() as rig:
        rig.ends_at = rig.clock() + 1
        with pytest.raises(ProbeFailedError) as failed:
            rig.prepare({"misdeed": "hangs"}, seconds=HANGS_SECONDS)
    assert failed.value.kind == "timeout"


def test_a_budget_without_an_end_is_one():
    with a_rig() as rig:
        rig.ends_at = math.inf
        assert rig.prepare({}, seconds=math.inf).step(2) == 2.1


def the_child(parent: psutil.Process) -> psutil.Process:
    ends_at = time.monotonic() + PATIENCE_SECONDS
    while not (found := parent.children()):
        assert time.monotonic() < ends_at, "it started none"
        time.sleep(0.05)
    return found[0]


def test_what_cannot_be_opened_is_refused_in_its_own_words():
    with pytest.raises(WhetError) as refused, a_rig(refused=True):
        pass
    assert (refused.value.what, refused.value.try_) == ("no such data", "data=FILE")
    assert isinstance(refused.value, UsageError)


def test_a_process_that_dies_at_the_start_says_how():
    with pytest.raises(ProbeFailedError, match="could not start"), a_rig(dies=True):
        pass
