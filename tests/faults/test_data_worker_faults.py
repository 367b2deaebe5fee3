"""Data workers that are killed, crash, exit or hang: the training ends with the same bits."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fault_job import Noisy, make_data
from fault_runs import ALL, BOUNDED, FaultRuns, counts, digest
from fork_server import ForkServer
from paths import SUPPORT
from whet.data import workers
from whet.data.adapters import LoadingConfig, open_source
from whet.data.batch import Position
from whet.device.cpu import CpuDevice
from whet.run.events import read_events

pytestmark = pytest.mark.torch

MAPPED = {"mapped": True, "samples": 48, "epochs": 2, "evaluates": False, "ema": False}
WORKERS = {"threads": 1, "workers": 2, "checkpoint_steps": 100}


@pytest.fixture
def life(fork_server: ForkServer, memory_folder: Path) -> FaultRuns:
    return FaultRuns(fork_server, memory_folder, **MAPPED, overrides=WORKERS)


@pytest.fixture
def undisturbed(life: FaultRuns) -> str:
    """The result of a run without workers."""
    life.finish(life.folder / "calm", overrides={**WORKERS, "workers": 0})
    return digest(life.folder / "calm")


def warnings_of(run: Path) -> list[str]:
    return [event.get("reason") for event in read_events(run, kinds=("warning",))]


@pytest.mark.parametrize("amount", [BOUNDED, ALL])
def test_a_worker_that_harms_itself(
    life: FaultRuns, undisturbed: str, amount: str, report_count: Callable[[str], None]
) -> None:
    ways = {
        "SIGKILL": "killed by SIGKILL",
        "SIGSEGV": "killed by SIGSEGV",
        "exit": "exit code 7",
        "SystemExit": "exit code 8",
        "hang": "no sample for 1 s",
        "SIGSTOP": "no sample for 1 s",
    }
    # Samples of the first, a middle and the last batch, of either worker.
    samples = (3, 17, 29, 41) if amount == "all" else (17,)
    if amount == "bounded":
        ways = {how: ways[how] for how in ("SIGKILL", "exit", "hang")}
    lost = 0
    for how, reported in ways.items():
        for sample in samples:
            run = life.folder / f"{how}-{sample}"
            mark = life.folder / f"mark-{how}-{sample}"
            # None of the eight samples that are inspected before the training.
            harm = {"sample": sample, "how": how, "times": 2 if sample == 41 else 1, "mark": str(mark)}
            # Only silent workers time out: on a busy machine a sample may take a second.
            patience = {"worker_timeout": 1.0} if "no sample" in reported else {}
            life.finish(run, harm=harm, **patience)
            assert digest(run) == undisturbed, how
            logged = warnings_of(run)
            assert len(logged) == harm["times"], (how, logged)
            assert reported in logged[0]
            lost += len(logged)
    report_count(counts(workers_lost=lost, runs_that_differ=0))


def test_a_worker_killed_from_outside(life: FaultRuns, undisturbed: str) -> None:
    """Killed while it reads ahead, or idle during a step, where the loss has no effect."""
    for harm, pause_at, which, num_lost in (("slow", 1, 0, 1), ("slow", 8, 1, 1), (None, 5, 1, 0)):
        run = life.folder / f"outside-{pause_at}"
        started = life.start(run, pause_at=pause_at, pause_seconds=0.2, harm=harm and {"how": harm})
        assert started.wait_for("workers")
        os.kill(json.loads(started.reported("workers")[0])[which], signal.SIGKILL)
        code, errors = started.life.wait()
        assert code == 0, errors
        assert digest(run) == undisturbed
        assert ["SIGKILL" in reason for reason in warnings_of(run)] == [True] * num_lost


def test_lost_again_and_again_is_an_error(life: FaultRuns) -> None:
    run = life.folder / "again"
    harm = {"sample": 17, "how": "SIGSEGV", "times": 100, "mark": str(life.folder / "mark")}
    (code, errors), _ = life.end(run, harm=harm)
    assert code == 1
    assert "lost 3 times" in errors
    assert "SIGSEGV" in errors
    assert "workers=0" in errors
    assert (life.folder / "mark").stat().st_size == workers.MAX_LOSSES


@pytest.mark.parametrize("number", [0, 2])
def test_an_exception_names_the_sample_and_the_line(life: FaultRuns, number: int) -> None:
    harm = {"sample": 17, "how": "raise"}
    (code, errors), _ = life.end(life.folder / "bad", harm=harm, overrides={**WORKERS, "workers": number})
    assert code == 1
    assert "sample 17 could not be read" in errors
    lines = (SUPPORT / "fault_job.py").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "truncated" in text)
    assert f"ValueError: a truncated image (fault_job.py:{line} in _suffer())" in errors
    assert errors.count("in _suffer") >= 2, "the traceback is shown too"


@pytest.mark.parametrize("when", ["reading", "idle"])
def test_no_worker_outlives_the_training(life: FaultRuns, when: str, report_count: Callable[[str], None]) -> None:
    harm = {"sample": 17, "how": "hang", "times": 1, "mark": str(life.folder / "mark")}
    options = {"harm": harm} if when == "reading" else {}
    started = life.start(life.folder / "killed", pause_at=1, pause_seconds=60, **options)
    assert started.wait_for("workers")
    pids = json.loads(started.reported("workers")[0])
    assert len(pids) == 2
    started.life.send(signal.SIGKILL)
    assert started.life.wait()[0] == -signal.SIGKILL
    killed = time.monotonic()
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() - killed < 6, "a worker is still running"
        time.sleep(0.01)
    report_count(counts(workers=len(pids), left_after_6_s=0))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts need root on Linux")
def test_a_small_dev_shm_is_enough(tmp_path: Path) -> None:
    """64 kB of shared memory and batches of 1 MB: batches do not use shared memory."""
    code = """
import torch
from whet.data.batch import Position
from whet.data.adapters import LoadingConfig, open_source
from whet.device.cpu import CpuDevice

class Images:
    def __len__(self): return 16
    def __getitem__(self, index): return {"x": torch.full((65536,), float(index)), "b": torch.ones(3).bfloat16()}

source = open_source(Images(), CpuDevice(), global_batch_size=4, seed=0, loading=LoadingConfig(workers=2))
total = sum(sample["x"].sum() for batch in source.batches(Position()) for sample in batch.samples)
source.close()
print(int(total))
"""
    mounted = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$0" -c "$1"'
    command = ["unshare", "-m", "sh", "-c", mounted, sys.executable, code]
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("no unshare here")
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.strip() == str(65536 * 120), done.stderr


def test_samples_come_as_they_were(tmp_path: Path) -> None:
    """Every kind of field, from a worker and from this process."""

    class Odd:
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> Any:
            x = torch.randn(2, 3, 4)
            return {
                "x": x.transpose(0, 2),
                "h": x.bfloat16(),
                "e": torch.empty(0, 5),
                "n": 3.5,
                "s": ("a", [1]),
                "0": x.sum(),
            }

    result = []
    for loading in (LoadingConfig(), LoadingConfig(workers=2)):
        source = open_source(Odd(), CpuDevice(), global_batch_size=2, seed=1, loading=loading)
        result.append([sample for batch in source.batches(Position()) for sample in batch.samples])
        source.close()
    for here, there in zip(*result, strict=True):
        assert here.keys() == there.keys()
        assert (here["n"], here["s"]) == (there["n"], there["s"])
        for name in ("x", "h", "e", "0"):
            assert here[name].dtype == there[name].dtype
            assert here[name].shape == there[name].shape
            assert torch.equal(here[name], there[name])


def test_an_epoch_left_in_the_middle() -> None:
    source = open_source(
        Noisy(*make_data(24, seed=0)), CpuDevice(), global_batch_size=4, seed=0, loading=LoadingConfig(workers=2)
    )
    for _ in range(2):
        next(source.batches(Position()))
    ids = [int(i) for batch in source.batches(Position(samples=8)) for i in batch.ids]
    assert len(set(ids)) == 16
    source.close()


# --- data that is other than it was ----------------------------------------------------------------------------------


class Rows:
    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor([float(self.rows[index])]), "noise": torch.rand(1)}


def fingerprint(rows: list[int], *, number: int = 0) -> str | None:
    return open_source(
        Rows(rows), CpuDevice(), global_batch_size=4, seed=0, loading=LoadingConfig(workers=number)
    ).fingerprint()


def test_changed_data_has_another_fingerprint() -> None:
    rows = list(range(40))
    same = fingerprint(rows)
    assert same is not None
    assert fingerprint(rows, number=2) == same
    assert fingerprint(rows[::-1]) != same, "reordered"
    assert fingerprint(rows[1:]) != same, "deleted"
    assert fingerprint([100, *rows[1:]]) != same, "edited"
    assert fingerprint([*rows, 40]) != same, "appended"


def test_data_that_is_never_the_same_has_none() -> None:
    class Clock(Rows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"x": torch.tensor([time.perf_counter_ns()])}

    assert open_source(Clock([1, 2, 3]), CpuDevice(), global_batch_size=1, seed=0).fingerprint() is None


def test_a_resume_with_changed_data_is_refused(life: FaultRuns) -> None:
    run = life.folder / "changed"
    life.end(run, stop_at={"3": "SIGTERM"})
    (code, errors), _ = life.end(run, data_seed=9)
    assert code == 1
    assert "the data is not what the run was started with" in errors


def test_a_worker_killed_during_fingerprinting_does_not_prevent_a_resume(life: FaultRuns, undisturbed: str) -> None:
    run = life.folder / "looked"
    harm = {"sample": 0, "how": "SIGKILL", "times": 1, "mark": str(life.folder / "mark")}
    life.end(run, stop_at={"3": "SIGTERM"}, harm=harm)
    assert (life.folder / "mark").stat().st_size == 1
    life.finish(run, harm=harm)
    assert digest(run) == undisturbed
