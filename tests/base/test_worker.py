"""Worker processes: messages, timeouts, deaths, and isolation from files in the working folder."""

import hashlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from paths import SUPPORT
from whet.autotune.process_bench import ProcessStepBench
from whet.base import env
from whet.base.errors import UsageError
from whet.base.worker import (
    JsonWorker,
    WorkerExitError,
    WorkerTimeoutError,
    describe_exit_code,
    error_from_json,
)
from whet.doctor.check import CheckGroup
from whet.doctor.runner import CheckRunner
from whet.hpo.trial_process import run_trial_process
from whet.machine.torch_info import torch_query
from whet.prove.launcher import ForkLauncher, ProcessLauncher
from whet.prove.training_process import ProcessOrder

TIMEOUT_SECONDS = 120
"""Timeout for calls that return immediately; only a hang takes this long."""
MB = 1024**2


def misbehaving(how: str, **arguments: object) -> JsonWorker:
    max_bytes = 300 * MB if how == "takes memory" else None
    return JsonWorker("worker_jobs:misbehave", {"how": how, **arguments}, max_bytes=max_bytes)


def test_messages_are_exchanged_in_order() -> None:
    with JsonWorker("worker_jobs:echo", {"device": "cpu"}) as worker:
        for number in range(3):
            assert worker.request({"step": number}, timeout=TIMEOUT_SECONDS) == {"device": "cpu", "step": number}
        large = "x" * 500_000
        assert worker.request({"large": large}, timeout=TIMEOUT_SECONDS)["large"] == large


def test_payload_larger_than_a_pipe_arrives() -> None:
    chunks = [b"begin", os.urandom(MB) * 100, b"", b"end"]
    with JsonWorker("worker_jobs:read_payload", payload=chunks) as worker:
        reply = worker.receive(TIMEOUT_SECONDS)
    assert reply == {"bytes": 100 * MB + 8, "hash": hashlib.sha256(b"".join(chunks)).hexdigest()}


@pytest.mark.parametrize("dies_after", [0, MB])
def test_death_while_the_payload_is_sent_is_reported(dies_after: int) -> None:
    before = threading.active_count()
    with JsonWorker("worker_jobs:read_payload", {"dies_after": dies_after}, payload=[bytes(100 * MB)]) as worker:
        with pytest.raises(WorkerExitError):
            worker.receive(TIMEOUT_SECONDS)
        assert worker.describe_exit() == "killed by SIGKILL"
    assert threading.active_count() == before, "the thread that writes has ended"


def test_payload_is_not_left_open_for_a_killed_child() -> None:
    descriptors = len(list(Path("/dev/fd").iterdir()))
    with JsonWorker("worker_jobs:echo", payload=[bytes(100 * MB)]) as worker:
        assert worker.request({"step": 1}, timeout=TIMEOUT_SECONDS) == {"step": 1}, "nothing waits for the payload"
    assert len(list(Path("/dev/fd").iterdir())) == descriptors


@pytest.mark.parametrize(
    ("how", "exit_text"),
    [
        ("killed", "killed by SIGKILL: a complaint"),
        ("raises", "exit code 1: ValueError: nonsense"),
        ("exits", "exit code 3: a complaint"),
        ("nothing", "exit code 0: a complaint"),
    ],
)
def test_exit_is_described_and_output_is_no_message(how: str, exit_text: str) -> None:
    with misbehaving(how) as worker:
        for _ in range(2):
            with pytest.raises(WorkerExitError):
                worker.receive(TIMEOUT_SECONDS)
        worker.send({"too": "late"})
        assert worker.describe_exit() == exit_text


def test_hanging_process_times_out_and_is_killed() -> None:
    ticks: list[float] = []
    with misbehaving("hangs") as worker:
        worker.on_tick = lambda: ticks.append(time.monotonic())
        with pytest.raises(WorkerTimeoutError):
            worker.receive(1.2)
        process = psutil.Process(worker.pid)
    assert ticks
    assert not process.is_running()


def test_process_over_the_memory_limit_is_killed() -> None:
    with misbehaving("takes memory", bytes=800 * MB) as worker:
        with pytest.raises(WorkerExitError):
            worker.receive(TIMEOUT_SECONDS)
        assert worker.killed_at_bytes is not None
        assert worker.killed_at_bytes > 300 * MB


def test_error_of_the_child_is_rebuilt_in_the_parent() -> None:
    with misbehaving("usage error") as worker:
        error = error_from_json(worker.receive(TIMEOUT_SECONDS))
    assert isinstance(error, UsageError)
    assert (error.what, error.got, error.try_) == ("no such data", "nothing", "data=FILE")


def test_leftover_children_do_not_block_and_are_killed() -> None:
    before = {*psutil.Process().children(recursive=True)}
    with misbehaving("leaves a child") as worker:
        assert worker.receive(TIMEOUT_SECONDS) == {"done": True}
        with pytest.raises(WorkerExitError):
            worker.receive(TIMEOUT_SECONDS)
        worker.wait(TIMEOUT_SECONDS)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while {*psutil.Process().children(recursive=True)} - before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("is_threaded", [True, False])
def test_child_ends_with_its_parent(is_threaded: bool) -> None:
    code = (
        "import os, time\n"
        "from whet.base.worker import JsonWorker\n"
        f"with JsonWorker('worker_jobs:echo', is_threaded={is_threaded}) as worker:\n"
        "    worker.request({}, timeout=60)\n"
        "    print(worker.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    environment = env.child_environment(PYTHONPATH=str(SUPPORT))
    with psutil.Popen([sys.executable, "-c", code], env=environment, stdout=-1, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(timeout=TIMEOUT_SECONDS)
    assert not child.is_running()


def test_exit_codes_are_described() -> None:
    assert describe_exit_code(3) == "exit code 3"
    assert describe_exit_code(-200) == "killed by signal 200"


# --- Isolation -------------------------------------------------------------------------------------------------------


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder, a PYTHONPATH and a sys.path with files that write a marker when they are imported.

    This process is not isolated from them: it imports what it needs before.
    """
    folder, marker = tmp_path / "hostile", tmp_path / "marker"
    folder.mkdir()
    for name in ("json", "queue", "traceback", "select", "sitecustomize", "torch", "numpy", "pydantic", "whet"):
        (folder / f"{name}.py").write_text(f"open({str(marker)!r}, 'a').write({name!r} + ' ')\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(sys, "path", [str(folder), "", *sys.path])
    return marker


def test_path_of_the_parent_comes_last(marker: Path) -> None:
    with JsonWorker("worker_jobs:describe_process") as worker:
        described = worker.receive(TIMEOUT_SECONDS)
    hostile = os.getcwd()  # noqa: PTH109
    # The paths that a child starts with. Libraries may have added more to the path of this process.
    fresh = subprocess.run(
        [sys.executable, "-I", "-c", "import sys; print(*sys.path, sep=chr(10))"], capture_output=True, text=True
    )
    own = [path for path in fresh.stdout.split() if path in described["path"]]
    assert described["path"].index(hostile) > max(map(described["path"].index, own))
    assert described["python_path"] == hostile, "processes started by the child see it again"
    assert described["stdin"] == ""
    assert not marker.exists()


def test_measuring_process_is_isolated(marker: Path) -> None:
    with ProcessStepBench("faulty_step_benches:open_bench", {}) as bench:
        assert bench.prepare({}, seconds=TIMEOUT_SECONDS).step(2) == 2.1
    assert not marker.exists(), marker.read_text()


def test_trial_process_is_isolated(marker: Path, tmp_path: Path) -> None:
    ended = run_trial_process(
        "worker_jobs:train_trial",
        {},
        log=tmp_path / "log",
        on_evaluation=lambda *_: True,
        should_stop=lambda: False,
        heartbeat=lambda: None,
    )
    assert ended.code == 0, (tmp_path / "log").read_text()
    assert not marker.exists(), marker.read_text()


@pytest.mark.torch
def test_torch_query_is_isolated(marker: Path) -> None:
    with torch_query() as result:
        assert result().error is None
    assert not marker.exists(), marker.read_text()


@pytest.mark.slow
@pytest.mark.torch
def test_doctor_process_is_isolated(marker: Path) -> None:
    group = CheckGroup(name="planted", table="planted_checks:CASES")
    runner = CheckRunner(
        device="cpu", ends_at=time.monotonic() + TIMEOUT_SECONDS, budget_seconds=TIMEOUT_SECONDS, only_quick=True
    )
    assert [result.name for result in runner.run(group)] == ["fine", "raises"]
    assert not marker.exists(), marker.read_text()


@pytest.mark.torch
@pytest.mark.parametrize("is_forked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_proof_process_is_isolated(marker: Path, tmp_path: Path, is_forked: bool) -> None:
    order = ProcessOrder(
        target="worker_jobs:train_piece",
        arguments={},
        run=tmp_path / "run",
        messages=tmp_path / "messages",
        output=tmp_path / "output",
    )
    with ForkLauncher(1) if is_forked else ProcessLauncher(1) as launcher:
        if isinstance(launcher, ForkLauncher):
            launcher.load(order.target, {})
        process = launcher.start(order)
        assert process.wait(TIMEOUT_SECONDS) == 0, process.failure()
        assert [message["kind"] for message in process.messages("end")] == ["end"]
    assert not marker.exists(), marker.read_text()
