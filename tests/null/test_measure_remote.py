"""A probe in a process of its own that dies, hangs or takes too much is reported, and what comes after it works."""

from pathlib import Path

import pytest

from whet.base import env
from whet.base.errors import UsageError, WhetError
from whet.measure.remote import RemoteRig
from whet.measure.rig import ProbeFailedError

MB = 1024**2


def a_rig(*, most_bytes: int | None = None, **arguments: object) -> RemoteRig:
    environment = env.for_child(PYTHONPATH=f"{Path(__file__).parent}:{env.read('PYTHONPATH') or ''}")
    return RemoteRig("planted_rigs:open_rig", arguments, environment=environment, most_bytes=most_bytes)


@pytest.fixture(scope="module")
def rig():
    with a_rig(most_bytes=400 * MB) as rig:
        yield rig


def test_a_remote_rig_answers_as_the_rig_in_the_child_does(rig):
    assert rig.plan.workload.recipe == "planted"
    assert rig.predicted_bytes({"micro_batch": 4}) is None
    assert rig.agreement({"precision": "tf32"}, seconds=5).agrees
    assert not rig.agreement({"precision": "bf16"}, seconds=5).agrees
    prepared = rig.prepare({"misdeed": "prints"}, seconds=5)
    assert (prepared.preparation_seconds, prepared.step_seconds) == (0.5, 0.1)
    assert prepared.step(2) == 2.1
    assert prepared.peak_bytes() == 7
    prepared.close()


@pytest.mark.parametrize(
    ("misdeed", "kind", "words"),
    [
        ("killed", "crash", "SIGKILL"),
        ("aborts", "crash", "SIGABRT"),
        ("hangs", "timeout", "no answer after 1.0 s"),
        ("takes too much", "oom", "of 400 MB and was ended"),
        ("out of memory", "oom", "MPS backend out of memory"),
        ("raises", "error", "ValueError: nonsense"),
    ],
)
def test_a_probe_that_goes_wrong_is_reported_and_the_next_one_works(rig, misdeed, kind, words):
    before = rig.prepare({}, seconds=5)
    assert before.step(0) == 0.1
    with pytest.raises(ProbeFailedError) as failed:
        rig.prepare({"misdeed": misdeed}, seconds=30 if misdeed == "takes too much" else 1)
    assert failed.value.kind == kind
    assert words in failed.value.reason
    # What was ready before is made ready again if its process is gone.
    assert before.step(1) == 1.1
    before.close()


def test_a_process_that_dies_between_steps_is_reported_too(rig):
    prepared = rig.prepare({"misdeed": "dies later"}, seconds=5)
    assert prepared.step(2) == 2.1
    with pytest.raises(ProbeFailedError, match="SIGABRT"):
        prepared.step(3)
    assert prepared.peak_bytes() == 7, "what is known stays known"
    prepared.close()


def test_what_cannot_be_opened_is_refused_in_its_own_words():
    with pytest.raises(WhetError) as refused, a_rig(refused=True):
        pass
    assert (refused.value.what, refused.value.try_) == ("no such data", "data=FILE")
    assert isinstance(refused.value, UsageError)


def test_a_process_that_dies_at_the_start_says_how():
    with pytest.raises(ProbeFailedError, match="could not start"), a_rig(dies=True):
        pass
