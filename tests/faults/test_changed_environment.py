"""A run that resumes elsewhere reports the changes; other data or another batch size must be allowed by name."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import checkpoint_damage
from fault_runs import SMALL, FaultRuns
from fork_server import ForkServer
from whet.checkpoint import store
from whet.report.run_report import summarize
from whet.run.events import read_events
from whet.training.restore import CUSTOM_LOOP

pytestmark = pytest.mark.torch

CHANGES: dict[str, Any] = {
    "threads": 8,
    "torch": "2.11.0",
    "python": "3.12.1",
    "device": "mps",
    "world_size": 2,
    "micro_batch": 4,
    "precision": "bf16",
    "platform": "macOS 15.1 arm64",
    "cpu_kernels": "DEFAULT",
    "deterministic": True,
    "MKL_CBWR": "COMPATIBLE",
}


IN_GATE = {"torch", "device", "MKL_CBWR"}


@pytest.fixture(scope="module")
def stopped(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    fault_runs = SMALL(fork_server, tmp_path_factory.mktemp("stopped"))
    (code, errors), _ = fault_runs.end(fault_runs.folder / "run", stop_at={"3": "SIGTERM"})
    assert code == 143, errors
    return fault_runs.folder / "run"


@pytest.fixture
def run(fault_runs: FaultRuns, stopped: Path) -> Path:
    """A run that was stopped after step 3."""
    return Path(shutil.copytree(stopped, fault_runs.folder / "run"))


def newest(run: Path) -> store.LoadedCheckpoint:
    result = store.load_newest(run / "checkpoints")
    assert result is not None
    return result


def test_nothing_has_changed(fault_runs: FaultRuns, run: Path) -> None:
    started = fault_runs.finish(run)
    assert started.reported("resume") == [f"3 {CUSTOM_LOOP}"]
    (resumed,) = read_events(run, kinds=("resume",))
    assert resumed.get("exactness").startswith(CUSTOM_LOOP)
    about = newest(run).snapshot.info
    assert (about.exactness, about.attempt, about.parent) == ("bit-exact", 2, "step-000000003")
    assert summarize(run).inexact_since is None


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_GATE else pytest.mark.slow) for name in CHANGES]
)
def test_changes_are_named_simulated(fault_runs: FaultRuns, run: Path, name: str) -> None:
    """As if the checkpoint had been made on another machine."""
    folder = run / "checkpoints" / "step-000000003"
    now = newest(run).snapshot.info.environment[name]
    lie = checkpoint_damage.in_manifest("info", "environment", name, value=CHANGES[name])
    checkpoint_damage.write_files(folder, lie(checkpoint_damage.read_files(folder)))
    started = fault_runs.finish(run)
    reported = f"{name} {CHANGES[name]} -> {now}"
    assert started.reported("resume") == [f"3 not bit-exact: {reported}"]
    assert newest(run).snapshot.info.reasons == (f"since step 3: {reported}",)
    report = summarize(run)
    assert (report.inexact_since, report.inexact_reason) == (3, reported)


@pytest.mark.parametrize(
    ("change", "allow", "what"),
    [
        ({"data_seed": 5}, "data", "the data is not what the run was started with"),
        pytest.param({"samples": 40}, "data", "the data is not what the run was started with", marks=pytest.mark.slow),
        ({"global_batch_size": 16}, "batch", "a different global_batch_size"),
    ],
    ids=["other data", "more data", "another batch"],
)
def test_other_data_and_another_batch_must_be_allowed(
    fault_runs: FaultRuns, run: Path, change: dict[str, Any], allow: str, what: str
) -> None:
    ended, _ = fault_runs.end(run, **change)
    assert ended.code == 1
    assert what in ended.errors
    assert f"--allow {allow}" in ended.errors
    wrong = {"data": "batch", "batch": "data"}[allow]
    assert fault_runs.end(run, **change, allow=[wrong])[0].code == 1
    started = fault_runs.finish(run, **change, allow=[allow])
    assert "not bit-exact" in started.reported("resume")[0]
    assert summarize(run).inexact_since == 3
    assert newest(run).snapshot.info.reasons != ()
    # The mark stays when the run is resumed again.
    assert fault_runs.finish(run, **change, epochs=2).resumed_from > 0
    assert newest(run).snapshot.info.reasons != ()


def test_only_known_changes_can_be_allowed(fault_runs: FaultRuns, run: Path) -> None:
    ended, _ = fault_runs.end(run, allow=["everything"])
    assert ended.code == 1
    assert "data or batch" in ended.errors
