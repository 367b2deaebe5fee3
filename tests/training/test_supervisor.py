"""A killed training restarts by itself; real processes, real signals."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fork_server import TIMEOUT_SECONDS
from warm_python import WarmPython
from whet.checkpoint import store
from whet.machine.facts import Machine
from whet.plan.plan import make_plan, read_plan, with_runtime_changes
from whet.plan.setting import MeasuredSetting
from whet.plan.workload import Workload
from whet.report.run_report import summarize
from whet.run.events import EventLog, read_events
from whet.run.folder import create_run, open_run
from whet.training.supervisor import prepare_restart

pytestmark = pytest.mark.torch

SMALL = ("arch.hidden_size=32", "arch.layers=1", "arch.max_length=24", "arch.vocab_size=600", "threads=1")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    rows = [{"text": f"{'ab'[n % 2]} word{n % 7} {n}", "label": "ab"[n % 2]} for n in range(1_600)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def words(table: Path, run: Path, *, epochs: int = 2) -> list[str]:
    keys = (f"data={table}", f"epochs={epochs}", "global_batch_size=8", "checkpoint_steps=25", "dropout=0.2", *SMALL)
    # A busy machine may estimate so long a run that it is measured first.
    return ["train", "text", *keys, "--run", str(run), "--no-measure"]


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "whet", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def child_after(process: subprocess.Popen[str], run: Path, *, step: int) -> psutil.Process:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if (run / "checkpoints").exists() and any(there >= step for there in store.list_steps(run / "checkpoints")):
            return psutil.Process(process.pid).children()[0]
        time.sleep(0.02)
    raise AssertionError("the training did not get there")


def test_a_killed_training_restarts_and_ends_with_the_same_bits(
    table: Path, tmp_path: Path, warm_python: WarmPython
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    undisturbed = warm_python.run("-m", "whet", *words(table, whole), "--max-restarts", "0", cwd=tmp_path)
    assert undisturbed.returncode == 0, undisturbed.stderr
    process = start(*words(table, cut))
    child_after(process, cut, step=50).kill()
    out, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, errors
    assert "the training process was killed by SIGKILL; it resumes with the same plan" in errors
    assert "all 2 epochs done" in out
    assert len(list(read_events(open_run(cut), kinds=("start", "resume")))) == 2
    ours, theirs = store.load_newest(open_run(cut).checkpoints), store.load_newest(open_run(whole).checkpoints)
    assert ours is not None
    assert theirs is not None
    assert all(torch.equal(tensor, theirs[1].tensors[name]) for name, tensor in ours[1].tensors.items())
    report = summarize(cut)
    assert report.inexact_since is None
    assert report.uptime is not None
    assert 0 < report.uptime < 1


def test_one_ctrl_c_to_the_parent_saves_and_stops(table: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # Far longer than it takes to stop it.
    process = start(*words(table, run, epochs=100))
    child = child_after(process, run, step=25)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130, errors
    assert "saved at step" in errors
    assert "to resume:" in errors
    assert not child.is_running()


@pytest.mark.skipif(sys.platform != "linux", reason="the system does it on Linux; elsewhere a thread, within a second")
def test_killing_the_parent_kills_the_training(table: Path, tmp_path: Path) -> None:
    """Under nohup, where a lost terminal changes nothing before."""
    run = tmp_path / "run"
    process = start(
        *words(table, run, epochs=100),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    child = child_after(process, run, step=25)
    child.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    assert child_after(process, run, step=max(store.list_steps(run / "checkpoints")) + 25) == child
    assert process.poll() is None
    process.kill()
    process.communicate()
    psutil.wait_procs([child], timeout=120)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


# --- decisions about a run whose process died ------------------------------------------------------------------------


def killed_run(
    folder: Path, *, began: int, reached: int, pressure: bool = False, overrides: Any = None, **workload: Any
) -> Path:
    facts = Workload(recipe="t", num_parameters=10, global_batch_size=32, **workload)
    plan = make_plan(Machine(name="m"), facts, overrides=overrides or {})
    plan = with_runtime_changes(plan, {"micro_batch": MeasuredSetting(value=32, reason="for this test", evidence={})})
    run = create_run(folder, recipe="t", config={}, plan=plan.as_json(), machine={}, versions={}, command=["whet"])
    with EventLog(run) as log:
        log.append("start" if not began else "resume", step=began)
        for step in range(began + 1, reached + 1):
            log.append("step", step=step, loss=1.0)
        if pressure:
            log.append("pressure", step=reached, level="critical")
    return run.path


@pytest.mark.parametrize(
    ("began", "reached", "is_first", "pressure", "micro_batch"),
    [
        (0, 5, True, False, 32),
        (0, 5, True, True, 16),
        (40, 50, False, False, 16),
        (40, 60, False, False, 32),
        (40, 60, False, True, 16),
    ],
    ids=["killed once", "after pressure", "again soon", "again late", "again late after pressure"],
)
def test_killed_soon_again_or_under_pressure_means_fewer_samples_at_once(
    tmp_path: Path, began: int, reached: int, is_first: bool, pressure: bool, micro_batch: int
) -> None:
    run = killed_run(tmp_path / "run", began=began, reached=reached, pressure=pressure)
    reported = prepare_restart(run, killer="SIGKILL", is_first=is_first)
    plan = read_plan(open_run(run).plan, where="plan")
    assert plan.micro_batch == micro_batch
    assert micro_batch == 32 or plan.accumulation == 2
    (restart,) = read_events(open_run(run), kinds=("restart",))
    is_lowered = micro_batch == 16
    assert ("micro-batch 16 instead of 32" in reported) == is_lowered
    assert (restart.get("exact") is False) == is_lowered
    assert summarize(run).inexact_since == (reached if is_lowered else None)


def test_a_model_with_batchnorm_keeps_its_micro_batch(tmp_path: Path) -> None:
    run = killed_run(tmp_path / "run", began=40, reached=41, has_batchnorm=True)
    assert "the micro-batch cannot be smaller" in prepare_restart(run, killer="SIGKILL", is_first=False)
    assert read_plan(open_run(run).plan, where="plan").micro_batch == 32


def test_a_crash_is_not_out_of_memory_and_overrides_stay(tmp_path: Path) -> None:
    crashed = killed_run(tmp_path / "crashed", began=40, reached=41)
    assert prepare_restart(crashed, killer="SIGSEGV", is_first=False) == "it resumes with the same plan"
    wished = killed_run(tmp_path / "wished", began=40, reached=41, overrides={"micro_batch": 32})
    assert "micro_batch=32 is your override and stays" in prepare_restart(wished, killer="SIGKILL", is_first=False)
    for run in (crashed, wished):
        assert read_plan(open_run(run).plan, where="plan").micro_batch == 32


@pytest.mark.slow
def test_under_nohup_a_lost_terminal_changes_nothing(table: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(*words(table, run), preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    child_after(process, run, step=25)
    process.send_signal(signal.SIGHUP)
    _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, errors


def test_a_kill_before_the_start_is_reported(table: Path, tmp_path: Path) -> None:
    process = start(*words(table, tmp_path / "run"), "--quiet")
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not psutil.Process(process.pid).children() and time.monotonic() < deadline:
        time.sleep(0.01)
    psutil.Process(process.pid).children()[0].kill()
    _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 137
    assert "the training process was killed before its first step" in errors


CODES = {"2>/dev/full": 0, "2>&-": 0, ">&- 2>&-": 0, ">/dev/full": 1}
"""Only a requested save that could not be written is a failure."""


@pytest.mark.slow
def test_a_closed_or_full_standard_error_ends_no_training(table: Path, tmp_path: Path) -> None:
    for number, (redirect, code) in enumerate(CODES.items()):
        run = tmp_path / str(number)
        command = shlex.join([sys.executable, "-m", "whet", *words(table, run), "max_steps=12"])
        assert subprocess.run(f"{command} {redirect}", shell=True, stdout=subprocess.DEVNULL).returncode == code
        assert summarize(run).state == "done"


DEADLY = """
import os, signal
from whet.recipes.starter import MyRecipe

class Deadly(MyRecipe):
    calls = 0

    def loss(self, model, micro):
        Deadly.calls += 1
        if Deadly.calls == 4:
            with open({counter!r}, "a") as lives:
                lives.write("x")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, micro)

def recipe():
    return Deadly()
"""


@pytest.mark.slow
def test_a_training_that_is_killed_while_it_is_measured_starts_without(tmp_path: Path) -> None:
    recipe = tmp_path / "deadly.py"
    counter = tmp_path / "lives"
    recipe.write_text(
        DEADLY.format(counter=str(counter)).replace(
            "calls == 4", f"calls == 4 and not os.path.exists({str(counter)!r})"
        )
    )
    process = start(
        "train",
        str(recipe),
        "global_batch_size=8",
        "--run",
        str(tmp_path / "run"),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, errors
    assert counter.read_text() == "x"
    assert "the training process was killed by SIGKILL during measuring; it restarts without" in errors


@pytest.mark.slow
def test_a_training_that_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    """A recipe that kills itself: started three times in all, then the signal's exit code."""
    recipe = tmp_path / "deadly.py"
    counter = tmp_path / "lives"
    recipe.write_text(DEADLY.format(counter=str(counter)))
    command = [
        "train",
        str(recipe),
        "global_batch_size=8",
        "--run",
        str(tmp_path / "run"),
        "--max-restarts",
        "2",
        "--no-measure",
    ]
    process = start(*command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 137, errors
    assert len(counter.read_text()) == 3
    assert errors.count("was killed by SIGKILL") == 2
    assert "SIGKILL, after 2 restarts; --max-restarts allows no more" in errors
    assert "to resume: whet train" in errors
    assert "again, after fewer than 20 steps, so it resumes with micro-batch 4 instead of 8" in errors
