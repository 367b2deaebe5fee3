"""Start-up is fast and needs no torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cpu_time import spent_by_children
from paths import SUPPORT, Run

BROKEN_TORCH = SUPPORT / "broken_torch"


def best_seconds(*command: str, repeats: int = 5) -> float:
    """Return the best CPU seconds of several runs, which excludes the load of other processes."""
    seconds = []
    for _ in range(repeats):
        start = spent_by_children()
        subprocess.run([sys.executable, *command], check=True, capture_output=True)
        seconds.append(spent_by_children() - start)
    return min(seconds)


def test_help_takes_under_250_ms() -> None:
    assert best_seconds("-m", "whet", "--help") < 0.250


def test_import_takes_under_100_ms() -> None:
    assert best_seconds("-c", "import whet") - best_seconds("-c", "pass") < 0.100


def test_torch_is_imported_only_for_names_that_need_it() -> None:
    code = (
        "import sys, whet; training = "
        "{'Action', 'Callback', 'GlobalBatch', 'MicroBatch', 'OptimizerChoice', 'Outcome', 'Session', 'State', "
        "'TrainResult', 'check', 'compare', 'train', 'tune'};"
        "[getattr(whet, name) for name in whet.__all__ if name not in training]; print('torch' in sys.modules);"
        "[getattr(whet, name) for name in whet.__all__]; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_broken_torch_is_importable(whet: Run) -> None:
    """Guards the tests below: in their environment `import torch` fails."""
    done = subprocess.run(
        [sys.executable, "-c", "import torch"], env={"PYTHONPATH": str(BROKEN_TORCH)}, capture_output=True, text=True
    )
    assert "this torch raises on import" in done.stderr


@pytest.mark.parametrize("flags", [pytest.param((), marks=pytest.mark.slow), ("--json",)], ids=["text", "json"])
def test_probe_and_plan_work_with_a_broken_torch(whet: Run, flags: tuple[str, ...]) -> None:
    probe = whet("probe", *flags, path=BROKEN_TORCH)
    assert probe.returncode == 0, probe.stderr
    # The child of a probe is isolated from PYTHONPATH: tests/machine/test_torch_info.py has a torch that raises there.
    plan = whet("plan", "text", *flags, path=BROKEN_TORCH)
    assert plan.returncode == 0, plan.stderr
    assert "micro_batch" in plan.stdout
    if flags:
        json.loads(plan.stdout)


@pytest.mark.parametrize("flags", [(), pytest.param(("--json",), marks=pytest.mark.slow)], ids=["text", "json"])
def test_runs_and_report_work_with_a_broken_torch(whet: Run, tmp_path: Path, flags: tuple[str, ...]) -> None:
    from whet.run.events import EventLog
    from whet.run.folder import create_run, installed_versions

    run = create_run(
        tmp_path / "runs" / "text-001",
        recipe="text",
        config={},
        plan={},
        machine={},
        versions=installed_versions(),
        command=["whet", "train", "text"],
    )
    with EventLog(run) as log:
        log.append("start", step=0, total_steps=9)
        for step in range(1, 10):
            log.append("step", step=step, loss=1 / step)
        log.append("end", step=9, state="done")
    for words in (("runs",), ("report", "runs/text-001")):
        done = whet(*words, *flags, path=BROKEN_TORCH)
        assert done.returncode == 0, done.stderr
        assert "text-001" in done.stdout


def test_plan_for_a_known_machine_has_all_four_parts(whet: Run) -> None:
    plan = whet("plan", "text", "--machine", "m2-air-8gb", "--json", path=BROKEN_TORCH)
    assert plan.returncode == 0, plan.stderr
    settings = json.loads(plan.stdout)["settings"]
    assert settings["device"]["value"] == "mps"
    for setting in settings.values():
        assert set(setting) == {"value", "reason", "source", "evidence"}
        assert setting["evidence"]
