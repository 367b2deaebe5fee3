"""The same command resumes exactly where the run stopped."""

import dataclasses
import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fork_server import TIMEOUT_SECONDS, ForkedProcess, ForkServer
from paths import SUPPORT
from whet.base.errors import UsageError
from whet.checkpoint import store
from whet.run.events import read_events
from whet.run.folder import open_run
from whet.training.resume import check_unchanged

pytestmark = pytest.mark.torch

JOB = SUPPORT / "training_job.py"


def finish(fork_server: ForkServer, run: Path, *words: str) -> int:
    code, errors = fork_server.start(JOB, run, *words).wait()
    assert code in (0, 130, 143), errors
    return code


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "the training did not get there"
        time.sleep(0.01)


def wait_for_step(run: Path, step: int) -> None:
    """Wait until the log contains it; the log reaches the disk once a second."""
    log = run / "events.jsonl"
    until(lambda: log.exists() and any(e.step >= step for e in read_events(open_run(run), kinds=("step",))))


def held(fork_server: ForkServer, run: Path, step: int, *words: str) -> ForkedProcess:
    """A training that waits in the middle of a step until it is released."""
    process = fork_server.start(JOB, run, f"hold={step}", *words)
    until(Path(f"{run}.holds").exists)
    return process


def let_go(run: Path) -> None:
    Path(f"{run}.goes").touch()


def losses(run: Path) -> dict[int, float]:
    return {event.step: event.number("loss") for event in read_events(open_run(run), kinds=("step",))}


def final(run: Path) -> store.Snapshot:
    result = store.load_newest(open_run(run).checkpoints)
    assert result is not None
    return result[1]


@pytest.fixture(scope="module")
def uninterrupted(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    assert finish(fork_server, run) == 0
    return run


def assert_same(run: Path, whole: Path) -> None:
    assert losses(run) == losses(whole)
    ours, theirs = final(run), final(whole)
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in ours.tensors.items():
        assert torch.equal(tensor, theirs.tensors[name]), name
    assert ours.facts == theirs.facts


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupted_run_resumes_to_the_same_result(
    fork_server: ForkServer, uninterrupted: Path, tmp_path: Path, number: int, code: int
) -> None:
    run = tmp_path / "cut"
    process = held(fork_server, run, 13)
    process.send(number)
    let_go(run)
    ended, errors = process.wait()
    assert ended == code, errors
    stopped = json.loads((run / "result.json").read_text())
    assert stopped["state"] == "stopped"
    assert 12 <= stopped["step"] < 40
    assert stopped["step"] % 10, "in the middle of an epoch, or the test shows too little"
    assert finish(fork_server, run) == 0
    assert_same(run, uninterrupted)


def test_two_interrupts_stop_at_once(fork_server: ForkServer, tmp_path: Path) -> None:
    run = tmp_path / "cut"
    process = fork_server.start(JOB, run, "--slow", "epochs=1000", "measure=false")
    wait_for_step(run, 2)
    process.send(signal.SIGINT)
    process.send(signal.SIGINT)
    assert process.wait().code != 0


def test_sessions_add_up(fork_server: ForkServer, uninterrupted: Path, tmp_path: Path) -> None:
    run = tmp_path / "sittings"
    for session in range(4):
        assert finish(fork_server, run, "epochs_per_session=1") == 0
        state = json.loads((run / "result.json").read_text())
        assert state == {"state": "done" if session == 3 else "stopped", "step": 10 * (session + 1)}
    assert_same(run, uninterrupted)


def test_a_killed_run_resumes_from_its_last_checkpoint(
    fork_server: ForkServer, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "killed"
    process = held(fork_server, run, 14, 'overrides={"checkpoint_steps": 3}')
    # It may still be written during later steps.
    until(lambda: 12 in store.list_steps(run / "checkpoints"))
    process.send(signal.SIGKILL)
    assert process.wait().code == -signal.SIGKILL
    assert finish(fork_server, run, 'overrides={"checkpoint_steps": 3}') == 0
    assert_same(run, uninterrupted)


def test_a_run_killed_before_its_first_checkpoint_begins_again(
    fork_server: ForkServer, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "killed"
    # Evaluations would save the best state: none comes this early.
    process = held(fork_server, run, 3, "eval_every=30")
    until(lambda: 0 in store.list_steps(run / "checkpoints"))
    process.send(signal.SIGKILL)
    process.wait()
    assert store.list_steps(open_run(run).checkpoints) == [0], "the first state only"
    assert finish(fork_server, run, "eval_every=30") == 0
    assert losses(run) == losses(uninterrupted)
    assert len(losses(run)) == 40


def damage(checkpoint: Path) -> None:
    """Flip one bit, so that all sizes stay correct."""
    data = bytearray((checkpoint / store.TENSORS).read_bytes())
    data[-3] ^= 1
    (checkpoint / store.TENSORS).write_bytes(data)


def test_a_damaged_checkpoint_is_left_for_an_older_one(
    fork_server: ForkServer, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "damaged"
    assert finish(fork_server, run, "epochs_per_session=1", 'overrides={"checkpoint_steps": 4}') == 0
    folder = open_run(run).checkpoints
    newest = folder / store.checkpoint_name(max(store.list_steps(folder)))
    damage(newest)
    assert finish(fork_server, run, 'overrides={"checkpoint_steps": 4}') == 0
    (resumed,) = read_events(open_run(run), kinds=("resume",))
    assert resumed.step == 8
    assert "damaged" in str(resumed.get("rejected"))
    assert_same(run, uninterrupted)


def test_a_damaged_checkpoint_does_not_displace_a_complete_one(fork_server: ForkServer, tmp_path: Path) -> None:
    run, overrides = tmp_path / "damaged", 'overrides={"checkpoint_steps": 40, "keep_checkpoints": 3}'
    assert finish(fork_server, run, "epochs_per_session=1", overrides) == 0
    folder = open_run(run).checkpoints
    assert store.list_steps(folder) == [0, 7, 10]
    damage(folder / store.checkpoint_name(10))
    assert finish(fork_server, run, "epochs_per_session=2", overrides) == 0
    assert store.list_steps(folder) == [7, 14, 20]


def test_a_changed_key_is_refused_by_name(fork_server: ForkServer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert finish(fork_server, run, "epochs_per_session=1") == 0
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}
    process = fork_server.start(JOB, run, "seed=12")
    code, errors = process.wait()
    assert code == 1
    assert "was started with a different seed" in errors
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}
    assert after == before


def test_of_a_changed_group_only_the_difference_is_named() -> None:
    saved = {"arch": {"hidden_size": 64, "layers": 2, "heads": {"a": 1, "b": 2}}, "seed": 1}
    asked = {"arch": {"hidden_size": 32, "layers": 2, "heads": {"a": 1, "b": 3}}, "seed": 1}
    with pytest.raises(UsageError, match="another arch") as caught:
        check_unchanged(saved, asked, where=Path("runs/a"))
    assert caught.value.got == "arch.hidden_size=32 arch.heads.b=3; the run has arch.hidden_size=64 arch.heads.b=2"
    assert str(caught.value.try_).startswith("arch.hidden_size=64 arch.heads.b=2 to resume")


def test_epochs_may_grow(fork_server: ForkServer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert finish(fork_server, run, "epochs=1", 'schedule="constant"') == 0
    assert finish(fork_server, run, "epochs=2", 'schedule="constant"') == 0
    assert json.loads((run / "result.json").read_text()) == {"state": "done", "step": 20}


def test_only_one_process_trains_in_a_folder(fork_server: ForkServer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = fork_server.start(JOB, run, "--slow", "epochs=1000", "measure=false")
    wait_for_step(run, 1)
    second = fork_server.start(JOB, run)
    code, errors = second.wait()
    assert code == 1
    assert str(first.pid) in errors
    first.send(signal.SIGTERM)
    assert first.wait().code == 143


@pytest.fixture(scope="module")
def one_session(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "one session"
    assert finish(fork_server, run, "epochs_per_session=1") == 0
    return run


@pytest.mark.parametrize(
    "forgotten",
    [
        "rng",
        "position",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("ema", "optimizer", "schedule")),
    ],
)
def test_the_comparison_can_fail(
    fork_server: ForkServer, uninterrupted: Path, one_session: Path, tmp_path: Path, forgotten: str
) -> None:
    """A checkpoint that omits something is detected: the fault is planted in the saved state."""
    run = tmp_path / "mutant"
    shutil.copytree(one_session, run)
    folder = open_run(run).checkpoints
    step, snapshot, _ = store.load_newest(folder)  # type: ignore[misc]
    store.durable.remove(folder / store.checkpoint_name(step))
    facts = json.loads(json.dumps(snapshot.facts))
    tensors = dict(snapshot.tensors)
    if forgotten == "position":
        facts["progress"]["progress"]["position"] = {"epoch": 0, "samples": 16}
    elif forgotten == "schedule":
        facts["progress"]["progress"]["step"] += 1
    elif forgotten == "rng":
        tensors["rng/torch"] = torch.Generator().manual_seed(1).get_state()
    else:
        tensors = {n: torch.zeros_like(t) if n.startswith(f"{forgotten}/") else t for n, t in tensors.items()}
    store.save_checkpoint(folder, dataclasses.replace(snapshot, tensors=tensors, facts=facts), step=step)
    finish(fork_server, run)
    with pytest.raises(AssertionError):
        assert_same(run, uninterrupted)
