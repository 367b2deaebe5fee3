"""The report of a run folder: progress, results, times, exactness, and strict JSON."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from whet.report.run_report import RunReport, summarize
from whet.report.run_status import read_status
from whet.run import lock
from whet.run.event_block import BLOCK_EVENTS
from whet.run.events import EventLog
from whet.run.folder import EVENTS_FILE, Run, create_run, resume_command

PLAN = {
    "settings": {
        "device": {"value": "cpu", "reason": "all there is", "source": "rule", "evidence": {"rule": "D1"}},
        "micro_batch": {"value": 16, "reason": "measured best", "source": "measured", "evidence": {"repeats": 3}},
    }
}
MACHINE = {"name": "here", "chip": "Apple M2", "os": {"name": "macOS", "version": "15.1"}}


@pytest.fixture(autouse=True, scope="module")
def _waits_for_no_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def make(path: Path, *, command: tuple[str, ...] = ("whet", "train", "text")) -> Run:
    return create_run(path, recipe="text", config={}, plan=PLAN, machine=MACHINE, versions={}, command=list(command))


def ticking(start: float = 1000.0) -> Callable[[], float]:
    now = [start - 1]

    def clock() -> float:
        now[0] += 1
        return now[0]

    return clock


def test_a_run_with_incidents_and_a_resume(tmp_path: Path) -> None:
    run = make(tmp_path / "text-001")
    with EventLog(run, clock=ticking(1000)) as log:
        log.append("start", step=0, total_steps=20, goal="accuracy", mode="max")
        for step in range(1, 11):
            seconds = {"data": 1.0, "forward": 2.0}
            log.append("step", step=step, loss=10.0 / step, epoch=1, samples=32 * step, seconds=seconds)
        log.append("eval", step=10, accuracy=0.9)
        log.append("oom", step=10, reason="too big", exact=False)
    with EventLog(run, clock=ticking(5000)) as log:
        log.append("resume", step=8)
        log.append("step", step=9, loss=0.25, epoch=1.5, samples=300, seconds={"data": 5.0, "forward": 7.0})
        log.append("eval", step=9, accuracy=0.5, note="text")
        log.append("eval", step=9, accuracy=0.25)
    for name in ("step-000000008", "step-000000009", "step-bad", ".tmp-step-000000010-1-aa"):
        (run.checkpoints / name).mkdir()
        (run.checkpoints / name / "model.safetensors").write_bytes(b"x" * 10)
        if name != "step-000000009":
            (run.checkpoints / name / "manifest.json").write_bytes(b"{}")
    report = summarize(run.path)
    assert (report.recipe, report.state, report.step, report.total_steps) == ("text", "stopped", 9, 20)
    assert (report.epoch, report.samples) == (1.5, 300)
    assert (report.first_loss, report.loss, report.best_loss, report.best_loss_step) == (10.0, 0.25, 0.25, 9)
    steps = report.track("step")
    assert steps is not None
    assert steps.step == tuple(range(1, 10))
    assert [e.metrics for e in report.evaluations] == [{"accuracy": 0.5}, {"accuracy": 0.25}]
    assert (report.goal, report.goal_mode) == ("accuracy", "max")
    assert (report.goal_value, report.best_goal, report.best_goal_step) == (0.25, 0.5, 9)
    assert report.seconds == {"forward": 8 * 2.0 + 7.0, "data": 8 * 1.0 + 5.0}
    assert list(report.seconds) == ["forward", "data"]
    assert (len(report.sessions), report.wall_seconds, report.training_seconds) == (2, 4003.0, 12.0 + 3.0)
    assert [(h.kind, h.step, h.time) for h in report.incidents] == [("oom", 10, 1012.0), ("resume", 8, 5000.0)]
    assert (report.inexact_since, report.inexact_reason) == (10, "too big")
    assert [(c.name, c.step, c.size_bytes) for c in report.checkpoints] == [("step-000000008", 8, 12)]
    assert [s.name for s in report.settings] == ["device", "micro_batch"]
    assert report.machine.startswith("Apple M2")
    assert report.resume == f"whet train text --run {run.path}"


def test_json_is_strict_and_round_trips(tmp_path: Path) -> None:
    run = make(tmp_path / "r")
    with EventLog(run) as log:
        log.append("start", step=0, goal="loss", mode="min")
        for step, loss in enumerate((math.inf, 2.0, math.nan), start=1):
            log.append("step", step=step, loss=loss)
            log.append("eval", step=step, loss=loss)
        log.append("skip", step=3, norm=math.nan)
    report = summarize(run)
    assert (report.best_goal, report.best_goal_step) == (2.0, 2)
    text = json.dumps(report.as_json(), allow_nan=False)
    back = RunReport.from_json(json.loads(text), where="a file")
    assert back.as_json() == report.as_json()
    assert back.first_loss == math.inf
    assert back.loss is not None
    assert math.isnan(back.loss)
    assert math.isnan(back.incidents[0].fields["norm"])


def test_a_goal_may_be_minimized(tmp_path: Path) -> None:
    run = make(tmp_path / "r")
    with EventLog(run) as log:
        log.append("start", step=0, goal="perplexity", mode="min")
        for step, value in ((1, math.nan), (2, 3.0), (3, 4.0)):
            log.append("eval", step=step, perplexity=value)
    report = summarize(run)
    assert (report.best_goal, report.best_goal_step, report.goal_value) == (3.0, 2, 4.0)
    assert report.goal_mode == read_status(run).goal_mode == "min"


@pytest.mark.parametrize(
    ("workload", "logged"),
    [({"world_size": 4}, ", 4 processes"), ({"world_size": 1}, ""), ({}, ""), ({"world_size": "x"}, ""), (None, "")],
)
def test_several_processes_are_named_after_the_machine(tmp_path: Path, workload: object, logged: str) -> None:
    plan = {"settings": {}, "workload": workload}
    run = create_run(tmp_path / "r", recipe="r", config={}, plan=plan, machine={"name": "C"}, versions={}, command=[])
    assert (
        summarize(run.path).machine
        == f"unknown chip, unknown cores, unknown memory, unknown system, torch unknown{logged}"
    )


def test_a_run_that_never_started(tmp_path: Path) -> None:
    report = summarize(make(tmp_path / "r"))
    assert (report.state, report.step, report.loss, report.sessions) == ("never started", 0, None, ())
    assert report.resume is not None
    json.dumps(report.as_json(), allow_nan=False)


def test_only_a_run_that_stopped_is_to_be_resumed(tmp_path: Path) -> None:
    run = make(tmp_path / "r")
    with EventLog(run) as log:
        log.append("start", step=0)
        log.append("step", step=1, loss=1.0)
        with lock.acquire(run.path):
            running = summarize(run)
        assert (running.state, running.resume) == ("running", None)
        log.append("end", step=1, state="done")
    assert (summarize(run).state, summarize(run).resume) == ("done", None)


def test_only_a_running_training_has_time_left(tmp_path: Path) -> None:
    run = make(tmp_path / "r")
    with EventLog(run, clock=ticking()) as log:
        log.append("start", step=0, total_steps=100)
        for step in range(1, 11):
            log.append("step", step=step, loss=1.0, samples=32 * step)
    with lock.acquire(run.path):
        assert summarize(run).seconds_left == 90, "a step takes a second"
    assert summarize(run).seconds_left is None


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("whet", "train", "text", "--fresh"), "whet train text --run {path}"),
        (("whet", "train", "text", "--run", "mine"), "whet train text --run mine"),
        (("whet", "train", "text", "--run=mine"), "whet train text --run=mine"),
        (("whet", "train", "text", "data=my file"), "whet train text 'data=my file' --run {path}"),
    ],
)
def test_the_command_to_resume(tmp_path: Path, command: tuple[str, ...], expected: str) -> None:
    run = make(tmp_path / "r", command=command)
    assert resume_command(run) == expected.format(path=run.path)


def test_a_path_below_the_working_folder_is_shown_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path / "runs" / "r")
    monkeypatch.chdir(tmp_path)
    assert resume_command(run) == "whet train text --run runs/r"
    monkeypatch.undo()


def test_clocks_that_jump_back_give_no_negative_times(tmp_path: Path) -> None:
    run = make(tmp_path / "r")
    for start in (9_000_000.0, 1000.0):
        with EventLog(run, clock=ticking(start)) as log:
            log.append("start", step=0)
            log.append("step", step=1, loss=1.0)
    report = summarize(run)
    assert (report.wall_seconds, report.training_seconds, len(report.sessions)) == (0.0, 2.0, 2)
    times = iter((500.0, 20.0))
    with EventLog(run, clock=lambda: next(times)) as log:
        log.append("start", step=1)
        log.append("step", step=2, loss=1.0)
    assert summarize(run).training_seconds == 2.0


def test_damaged_lines_are_counted_and_a_strange_plan_or_machine_is_no_failure(tmp_path: Path) -> None:
    run = make(tmp_path / "r")
    with (run.path / EVENTS_FILE).open("ab") as file:
        file.write(b'{"kind":"step","time":1,"step":1,"loss":2}\nrubbish\n{"kind":"st')
    (run.path / "plan.json").write_text('{"settings": {"a": 3, "b": {"value": [1]}}}')
    (run.path / "machine.json").write_text('{"name": "later", "quantum": true}')
    report = summarize(run.path)
    assert (report.damaged_lines, report.loss, report.machine) == (1, 2.0, "later")
    assert [(s.name, s.value) for s in report.settings] == [("b", [1])]


def test_a_long_run_is_summed_from_the_index(tmp_path: Path) -> None:
    run = make(tmp_path / "r")
    steps = 40 * BLOCK_EVENTS
    with EventLog(run) as log:
        log.append("start", step=0, total_steps=steps)
        for step in range(1, steps + 1):
            log.append("step", step=step, loss=5.0 - (step == 7777), seconds={"data": 0.5})
    report = summarize(run)
    assert (report.best_loss, report.best_loss_step) == (4.0, 7777)
    assert report.seconds == {"data": steps / 2}
    steps_track = report.track("step")
    assert steps_track is not None
    loss = steps_track.line("loss")
    assert loss is not None
    assert loss.low is not None
    assert min(low for low in loss.low if low is not None) == 4.0
    began = time.thread_time()
    summarize(run)
    assert time.thread_time() - began < 1.0


def test_a_rollback_is_no_session(tmp_path: Path) -> None:
    run = make(tmp_path / "text-001")
    with EventLog(run, clock=ticking(1000)) as log:
        log.append("start", step=0, total_steps=20)
        log.append("step", step=1, loss=math.nan)
        log.append("resume", step=0, rollback_reason="step 1: the loss is nan")
        log.append("step", step=1, loss=1.0)
    with EventLog(run, clock=ticking(2000)) as log:
        log.append("resume", step=1)
        log.append("step", step=2, loss=0.5)
    report = summarize(run.path)
    assert [(span.started, span.ended) for span in report.sessions] == [(1000, 1003), (2000, 2001)]
    assert report.training_seconds == 4
    assert [entry.label for entry in report.timeline if entry.label] == ["rolled back", "resumed"]
