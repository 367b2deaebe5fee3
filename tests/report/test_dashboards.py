"""A dashboard gets every step once despite interruptions; training never waits for it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from paths import SUPPORT
from paths import Run as Whet
from whet.report.forward.dashboards import DashboardRow, ForwardedState, RunDescription, UnreachableError
from whet.report.forward.forwarder import forward_run
from whet.run.events import EventLog
from whet.run.folder import Run, create_run
from whet.run.lock import acquire

SIMULATED = SUPPORT / "simulated_dashboards"
HOSTILE = "=<b>\x1b[2J" + "x" * 300


@pytest.fixture(autouse=True, scope="module")
def _waits_for_no_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def run(tmp_path: Path) -> Run:
    plan = {"settings": {"device": {"value": "cpu", "reason": "", "source": "rule"}}}
    config = {"lr": 0.1, "arch": {"hidden_size": 8}, "data_paths": ["a", "b"], "data": None}
    return create_run(
        tmp_path / "runs" / "r", recipe="text", config=config, plan=plan, machine={}, versions={}, command=["whet"]
    )


def steps(log: EventLog, first: int, last: int, *, plus: float = 0.0) -> None:
    for number in range(first, last + 1):
        log.append("step", step=number, loss=number + plus, seconds={"data": 0.5})
        if number % 10 == 0:
            log.append("eval", step=number, accuracy=1 / number)


class SimulatedDashboard:
    """Keeps rows in memory; fails while `refuses` is set."""

    max_rows = 7

    def __init__(self, refuses: Sequence[int] = ()) -> None:
        self.rows: list[DashboardRow] = []
        self.calls = 0
        self.refuses = refuses
        self.ended: list[str | None] = []
        self.about: RunDescription | None = None

    def _answer(self) -> None:
        self.calls += 1
        if self.calls in self.refuses:
            raise UnreachableError("no route to host")

    def open(self, about: RunDescription) -> ForwardedState:
        self._answer()
        self.about = about
        return ForwardedState(step=max((row.step for row in self.rows), default=-1))

    def send(self, rows: Sequence[DashboardRow]) -> None:
        self._answer()
        assert len(rows) <= self.max_rows
        self.rows += rows

    def close(self, state: str | None) -> None:
        self.ended.append(state)

    def where(self) -> str:
        return "simulated"


@pytest.fixture
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet.report.forward.forwarder._FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr("whet.report.forward.forwarder._POLL_SECONDS", 0.05)


@pytest.mark.usefixtures("_no_pauses")
def test_a_simulated_dashboard_gets_every_step_once_during_the_run(run: Run) -> None:
    dashboard, reported = SimulatedDashboard(refuses=(1, 3, 4)), list[str]()
    with acquire(run.path), EventLog(run) as log:
        log.append("start", step=0, total_steps=60)
        steps(log, 1, 30)
        log.append("eval", step=30, void=1.0)
        log.flush()
        follower = threading.Thread(target=lambda: forward_run(run, dashboard, notify=reported.append), daemon=True)
        follower.start()
        deadline = time.monotonic() + 600
        while len(dashboard.rows) < 29 and time.monotonic() < deadline:
            time.sleep(0.01)
        # The newest step waits: an evaluation may still belong to it.
        assert [row.step for row in dashboard.rows] == list(range(1, 30))
        log.append("resume", step=25)
        steps(log, 26, 60, plus=0.5)
        log.append("checkpoint", step=60, name="step-000000060")
        log.append("end", step=60, state="stopped")
    follower.join(600)
    assert not follower.is_alive()
    assert [row.step for row in dashboard.rows] == list(range(1, 61))
    by_step = {row.step: row.values for row in dashboard.rows}
    assert by_step[20] == {"train/loss": 20.0, "seconds/data": 0.5, "eval/accuracy": 1 / 20}
    # Rows sent before they became void stay; rows held back have the repeated values.
    assert (by_step[29]["train/loss"], by_step[30]["train/loss"]) == (29.0, 30.5)
    assert by_step[30].keys() == {"train/loss", "seconds/data", "eval/accuracy"}
    assert dashboard.ended == ["stopped"]
    assert len([line for line in reported if line.startswith("no answer (no route to host)")]) == 2
    assert dashboard.about is not None
    assert dashboard.about.parameters == {
        "recipe": "text",
        "whet": run.header.whet,
        "lr": 0.1,
        "arch.hidden_size": 8,
        "data_paths": "['a', 'b']",
        "plan.device": "cpu",
    }


@pytest.mark.usefixtures("_no_pauses")
def test_the_next_command_sends_events_missing_on_a_simulated_dashboard(run: Run) -> None:
    dashboard = SimulatedDashboard()
    with EventLog(run) as log:
        steps(log, 1, 15)
    assert forward_run(run, dashboard, once=True).rows == 14
    with EventLog(run) as log:
        log.append("eval", step=15, accuracy=0.25)
        steps(log, 16, 20)
        log.append("end", step=20, state="done")
    done = forward_run(run, dashboard)
    assert (done.rows, done.last_step, done.state) == (6, 20, "done")
    assert dashboard.rows[14].values["eval/accuracy"] == 0.25
    assert forward_run(run, dashboard).rows == 0
    assert [row.step for row in dashboard.rows] == list(range(1, 21))


@pytest.mark.usefixtures("_no_pauses")
def test_it_can_be_stopped_while_nothing_happens_on_a_simulated_dashboard(run: Run) -> None:
    dashboard, stop = SimulatedDashboard(), threading.Event()
    with acquire(run.path), EventLog(run) as log:
        steps(log, 1, 15)
        log.flush()
        follower = threading.Thread(target=lambda: forward_run(run, dashboard, stop=stop), daemon=True)
        follower.start()
        deadline = time.monotonic() + 600
        while len(dashboard.rows) < 14 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        stop.set()
        follower.join(600)
    assert not follower.is_alive()
    assert dashboard.ended == [None]


@pytest.mark.usefixtures("_no_pauses")
def test_a_simulated_dashboard_that_never_answers(run: Run) -> None:
    with EventLog(run) as log:
        steps(log, 1, 15)
        log.append("end", step=15, state="done")
    dashboard = SimulatedDashboard(refuses=range(2, 1000))
    with pytest.raises(UnreachableError):
        forward_run(run, dashboard, once=True, tries=3)
    assert dashboard.ended == [None]
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    assert forward_run(run, SimulatedDashboard(refuses=range(1, 1000)), stop=stop).rows == 0


@pytest.mark.parametrize("name", [pytest.param("wandb", marks=pytest.mark.slow), "mlflow"])
def test_the_command_with_a_simulated_library(run: Run, tmp_path: Path, whet: Whet, name: str) -> None:
    with EventLog(run) as log:
        steps(log, 1, 60)
        for step in (50, 60):
            log.append("health", step=step, memory={"process": 3})
    with EventLog(run) as log:
        log.append("resume", step=40)
        steps(log, 41, 149)
        log.append("step", step=150, loss=150.0, seconds={"data": 0.5})
        log.append("health", step=150, memory={"process": 4})
        log.append("end", step=150, state="stopped")
    with EventLog(run) as log:
        log.append("resume", step=150)  # Rows that were pending at the stop are sent now.
        log.append("eval", step=150, **{"accuracy": 0.5, HOSTILE: 1.0})
        log.append("end", step=150, state="stopped")
    kept = tmp_path / "kept.json"
    environment = {
        "PYTHONPATH": os.pathsep.join([str(SIMULATED), os.environ.get("PYTHONPATH", "")]),
        "SIMULATED_DASHBOARD": str(kept),
    }
    first = whet("forward", "runs/r", "--to", name, "--project", "p", **environment)
    assert first.returncode == 0, first.stderr
    assert first.stdout == "forwarded 150 steps, up to step 150; the run is stopped\n"
    with EventLog(run) as log:
        log.append("resume", step=145)
        steps(log, 146, 160)
        log.append("end", step=160, state="done")
    second = whet("forward", "runs/r", "--to", name, "--project", "p", **environment)
    assert second.stdout == "forwarded 10 steps, up to step 160; the run is done\n", second.stderr
    result = json.loads(kept.read_text())
    points = Counter((step, key) for step, values in result["rows"] for key in values if key != "_timestamp")
    assert {step for step, key in points if key == "train/loss"} == set(range(1, 161))
    assert {step for step, key in points if key == "eval/accuracy"} == set(range(10, 161, 10))
    assert {step for step, key in points if key == "health/memory/process"} == {150}
    assert set(points.values()) == {1}
    assert result["project"] == "p"
    assert str(result["config"]["arch.hidden_size"]) == "8"
    assert result["ended"] in (0, True, "FINISHED")


def test_a_missing_or_unknown_library_is_reported(run: Run, tmp_path: Path, whet: Whet) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "mlflow.py").write_text("raise ImportError('not here')")
    path = os.pathsep.join([str(tmp_path / "broken"), os.environ.get("PYTHONPATH", "")])
    missing = whet("forward", "runs/r", "--to", "mlflow", PYTHONPATH=path)
    assert missing.returncode == 1
    assert missing.stderr == "error: cannot import mlflow\n  got: not here\n  try: pip install mlflow\n"
    unknown = whet("forward", "runs/r", "--to", "wandbb")
    assert (unknown.returncode, "try: --to wandb" in unknown.stderr) == (2, True)


def test_ctrl_c_ends_it_and_the_run_stays_as_it_was(run: Run, tmp_path: Path) -> None:
    path = os.pathsep.join([str(SIMULATED), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "SIMULATED_DASHBOARD": str(tmp_path / "kept.json")}
    with acquire(run.path), EventLog(run) as log:
        log.append("start", step=0)
        steps(log, 1, 20)
        log.flush()
        before = sorted(child.name for child in run.path.iterdir())
        command = [sys.executable, "-m", "whet", "forward", str(run.path), "--to", "wandb"]
        forwarding = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        assert forwarding.stderr is not None
        assert "is forwarded to" in forwarding.stderr.readline()
        steps(log, 21, 30)
        log.flush()
        time.sleep(0.5)
        forwarding.send_signal(signal.SIGINT)
        assert forwarding.wait(600) == 130
        forwarding.stderr.close()
        assert sorted(child.name for child in run.path.iterdir()) == before
    result = json.loads((tmp_path / "kept.json").read_text())["rows"]
    assert [step for step, _ in result] == list(range(1, len(result) + 1))


def test_real_mlflow_holds_each_point_once(run: Run, tmp_path: Path, whet: Whet) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for last, state in ((20, "stopped"), (30, "done")):
        with EventLog(run) as log:
            log.append("resume", step=last - 12)
            steps(log, last - 11, last)
            log.append("end", step=last, state=state)
        done = whet("forward", "runs/r", "--to", "mlflow", MLFLOW_TRACKING_URI=store)
        assert done.returncode == 0, done.stderr
    code = (
        "import mlflow; client = mlflow.MlflowClient()\n"
        "where = client.get_experiment_by_name('whet').experiment_id; [run] = client.search_runs([where])\n"
        "print([p.step for p in client.get_metric_history(run.info.run_id, 'train/loss')], run.info.status)"
    )
    environment = {**os.environ, "MLFLOW_TRACKING_URI": store}
    read = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert read.stdout.strip() == f"{list(range(9, 31))} FINISHED"


def test_real_wandb_takes_a_run_twice(run: Run, tmp_path: Path, whet: Whet) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    with EventLog(run) as log:
        steps(log, 1, 20)
        log.append("end", step=20, state="done")
    places = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    first = whet("forward", "runs/r", "--to", "wandb", **places)
    assert first.stdout == "forwarded 20 steps, up to step 20; the run is done\n", first.stderr
    again = whet("forward", "runs/r", "--to", "wandb", **places)
    assert again.stdout == "forwarded 0 steps; the run is done\n", again.stderr
