"""`whet train --nproc` and torchrun with killed, suspended and interrupted processes: the group restarts from the last
checkpoint, or ends with a clear message. Real launchers, real signals."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import rank_processes
from fork_server import ForkServer
from whet.checkpoint import store
from whet.run.events import read_events

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SMALL = ("arch.hidden_size=32", "arch.layers=1", "arch.max_length=24", "arch.vocab_size=600", "threads=1")
LONGEST_SECONDS = 30
"""Timeout for the other ranks after one is lost."""


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    rows = [{"text": f"{'ab'[n % 2]} word{n % 7} {n}", "label": "ab"[n % 2]} for n in range(1_200)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def words(table: Path, run: Path, *more: str) -> list[str]:
    keys = (f"data={table}", "epochs=1", "global_batch_size=8", "checkpoint_steps=20", "dropout=0.2", "micro_batch=4")
    return ["train", "text", *keys, *SMALL, *more, "--device", "cpu", "--run-dir", str(run)]


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "whet", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def rank_of(process: psutil.Process) -> int | None:
    try:
        return int(process.environ()["RANK"])
    except (psutil.Error, KeyError):
        return None


def workers(launcher: int, run: Path, *, step: int, size: int) -> list[psutil.Process]:
    """Return the processes of a training by rank once it has saved a step."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if (run / "checkpoints").exists() and any(there >= step for there in store.list_steps(run / "checkpoints")):
            result = {rank_of(child): child for child in psutil.Process(launcher).children(recursive=True)}
            if all(rank in result for rank in range(size)):
                return [result[rank] for rank in range(size)]
        time.sleep(0.02)
    raise AssertionError("the training did not get there")


def ended(process: subprocess.Popen[str], *, seconds: float = 240) -> str:
    _, errors = process.communicate(timeout=seconds)
    return errors


@pytest.fixture(scope="module")
def whole(table: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Uninterrupted runs of two processes."""
    folder = tmp_path_factory.mktemp("whole")
    for kind in ("off", "full"):
        process = start(*words(table, folder / kind, f"sharding={kind}"), "--nproc", "2")
        errors = ended(process)
        assert process.returncode == 0, errors
    return {kind: folder / kind for kind in ("off", "full")}


def wait_for_restart(run: Path) -> float:
    """Return the time at which the launcher logged the restart of the group."""
    deadline = time.monotonic() + 120
    while not (result := list(read_events(run, kinds=("restart",)))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert result
    return time.monotonic()


@pytest.mark.parametrize("kind", ["off", "full"])
@pytest.mark.parametrize(
    ("rank", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGSTOP), (1, signal.SIGSTOP)]
)
def test_a_lost_process_is_started_again(
    table: Path, tmp_path: Path, whole: dict[str, Path], kind: str, rank: int, number: signal.Signals
) -> None:
    """Killed, or stopped and so hanging: all restart within 30 s and end with the bits of an uninterrupted run."""
    run = tmp_path / "run"
    process = start(*words(table, run, f"sharding={kind}"), "--nproc", "2")
    workers(process.pid, run, step=40, size=2)[rank].send_signal(number)
    began = time.monotonic()
    assert wait_for_restart(run) - began < LONGEST_SECONDS
    errors = ended(process)
    assert process.returncode == 0, errors
    assert f"rank {rank} of 2 was killed by SIGKILL" in errors
    if number == signal.SIGSTOP:
        assert f"rank {rank} of 2 has sent no heartbeat" in errors
    assert rank_processes.is_same(rank_processes.state(run), rank_processes.state(whole[kind]))


LOOPING = """
import os
from pathlib import Path
from whet.recipes.text.recipe import TextRecipe

class Looping(TextRecipe):
    steps = 0

    def loss(self, model, micro):
        self.steps += 1
        while self.steps == 100 and os.environ["RANK"] == "1" and not Path(__file__).with_suffix(".seen").exists():
            if not Path(__file__).with_suffix(".loops").exists():
                Path(__file__).with_suffix(".loops").touch()
        return super().loss(model, micro)

recipe = Looping
"""


def test_a_process_that_computes_for_ever_is_started_again(table: Path, tmp_path: Path, whole: dict[str, Path]) -> None:
    """With the default limits: a restart within 30 s, the line is named, and the bits are those of a normal run."""
    run, recipe = tmp_path / "run", tmp_path / "looping.py"
    recipe.write_text(LOOPING)
    reported = words(table, run, "sharding=off")
    process = start("train", str(recipe), *reported[2:], "--nproc", "2")
    deadline = time.monotonic() + 120
    while not recipe.with_suffix(".loops").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    began = time.monotonic()
    assert wait_for_restart(run) - began < LONGEST_SECONDS
    recipe.with_suffix(".seen").touch()
    errors = ended(process)
    assert process.returncode == 0, errors
    assert re.search(r"rank 1 of 2 makes no progress in step \d+, at looping.py:\d+", errors), errors
    assert rank_processes.is_same(rank_processes.state(run), rank_processes.state(whole["off"]))


def test_without_restarts_the_message_has_a_fix(table: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(*words(table, run), "--nproc", "2", "--max-restarts", "0")
    workers(process.pid, run, step=20, size=2)[1].kill()
    errors = ended(process, seconds=LONGEST_SECONDS)
    assert process.returncode == 137
    assert "rank 1 of 2 by SIGKILL" in errors
    assert "to resume from the last checkpoint" in errors


@pytest.mark.parametrize("kind", ["off", "full"])
def test_a_stopped_launcher_saves_once(table: Path, tmp_path: Path, whole: dict[str, Path], kind: str) -> None:
    run = tmp_path / "run"
    process = start(*words(table, run, f"sharding={kind}"), "--nproc", "2")
    workers(process.pid, run, step=20, size=2)
    process.send_signal(signal.SIGTERM)
    errors = ended(process, seconds=LONGEST_SECONDS)
    assert process.returncode == 143, errors
    saved = re.search(r"saved at step ([\d,]+)", errors)
    assert saved is not None, errors
    assert store.list_steps(run / "checkpoints")[-1] == int(saved[1].replace(",", ""))
    again = start(*words(table, run, f"sharding={kind}"), "--nproc", "2")
    errors = ended(again)
    assert again.returncode == 0, errors
    assert rank_processes.is_same(rank_processes.state(run), rank_processes.state(whole[kind]))


def test_a_failure_of_its_own_is_not_tried_again(tmp_path: Path) -> None:
    process = start(*words(tmp_path / "nothing.jsonl", tmp_path / "run"), "--nproc", "2")
    errors = ended(process, seconds=120)
    assert process.returncode == 2, errors
    assert "killed" not in errors


# --- torchrun with elastic groups ------------------------------------------------------------------------------------


def agent(port: int, output: Path, job: dict[str, Any]) -> subprocess.Popen[bytes]:
    """One of several machines, as torchrun sees them: three are enough, four are used."""
    options = ("--nnodes", "3:4", "--nproc-per-node", "1", "--max-restarts", "5", "--rdzv-backend", "c10d")
    options += ("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "whet", "--monitor-interval", "0.2")
    options += ("--rdzv-conf", "join_timeout=60,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3")
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(rank_processes.JOB), json.dumps(job)]
    # Agents of torch 2.13 that share one store never send a new agent the address of rank 0.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with output.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True, env=environment)


@pytest.mark.parametrize("kind", ["off", "full"])
def test_a_group_of_torchrun_shrinks_and_grows(fork_server: ForkServer, tmp_path: Path, kind: str) -> None:
    """4 -> 3 -> 4 processes with one global batch: the samples of every step stay, the weights agree to rounding."""
    run, side = tmp_path / "run", tmp_path / "side.txt"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"run": str(run), "side": str(side), "sharding": kind, "dropout": 0.0, "steps": 200}
    slow = {**job, "seconds": 0.3}
    agents = [agent(port, tmp_path / f"{number}.txt", slow) for number in range(4)]
    try:
        wait_until(run, size=4, step=10)
        # Not rank 0, to which all others connect.
        doomed = agents.pop()
        for process in (*psutil.Process(doomed.pid).children(recursive=True), psutil.Process(doomed.pid)):
            process.kill()
        doomed.wait()
        wait_until(run, size=3, step=20)
        agents.append(agent(port, tmp_path / "4.txt", slow))
        wait_until(run, size=4, step=30)
        codes = [process.wait(timeout=200) for process in agents]
        assert codes == [0] * 4, "\n".join(path.read_text() for path in sorted(tmp_path.glob("?.txt")))
    finally:
        for process in agents:
            if process.poll() is None:
                for worker in psutil.Process(process.pid).children(recursive=True):
                    worker.kill()
                process.kill()
                process.wait()
    alone = rank_processes.train(
        fork_server, tmp_path / "alone", 1, **{k: job[k] for k in ("sharding", "dropout", "steps")}
    )
    assert rank_processes.order(rank_processes.Ranks([], side)) == rank_processes.order(alone)
    assert rank_processes.distance(rank_processes.state(run), rank_processes.state(tmp_path / "alone")) < 1e-5


def wait_until(run: Path, *, size: int, step: int) -> None:
    """Wait until this many processes have saved the step or a later one."""
    deadline = time.monotonic() + 120
    result: Any = None
    while time.monotonic() < deadline:
        checkpoints = run / "checkpoints"
        there = store.list_steps(checkpoints) if checkpoints.exists() else []
        if there and there[-1] >= step:
            result = store.check_sizes(checkpoints / store.checkpoint_name(there[-1])).info.environment["world_size"]
            if result == size:
                return
        time.sleep(0.1)
    raise AssertionError(f"{size} were expected; {result} have saved the newest step")
