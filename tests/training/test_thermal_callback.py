"""ThermalPolicy: sensors change the time of a run, never its numbers. Sensors are simulated."""

import io
import itertools
import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import whet
from amounts import amount
from fake_device import FakeDevice
from fork_server import TIMEOUT_SECONDS
from paths import SUPPORT
from small_models import convnet, images
from whet.data.batch import GlobalBatch, Position
from whet.machine.facts import SystemState
from whet.machine.known import load_machine
from whet.plan.plan import make_plan
from whet.plan.workload import Workload
from whet.run.events import read_events
from whet.run.folder import open_run
from whet.step.step import Outcome
from whet.training.callback import Action
from whet.training.callbacks.event_log import Recorder
from whet.training.callbacks.progress_line import ProgressLine
from whet.training.callbacks.thermal import (
    DEBOUNCE_SECONDS,
    MAX_REST_SECONDS,
    MAX_REST_SHARE,
    PRESSURE_SAVE_SECONDS,
    REST_SECONDS_WITHOUT_SENSOR,
    SensorThread,
    ThermalPolicy,
)
from whet.training.progress import State

pytestmark = pytest.mark.torch

JOB = SUPPORT / "training_job.py"
COOL, HOT = SystemState(thermal="nominal"), SystemState(thermal="heavy")
PLANS = {
    policy: make_plan(
        load_machine("m2-air-8gb"),
        Workload(recipe="test", num_parameters=1000, global_batch_size=8),
        overrides={"on_heat": policy},
    )
    for policy in ("warn", "slow_down", "pause")
}

readings = st.builds(
    SystemState,
    thermal=st.sampled_from([None, "nominal", "moderate", "heavy", "trapping"]),
    memory_pressure=st.sampled_from([None, "normal", "warn", "critical"]),
    power_source=st.sampled_from([None, "mains", "battery"]),
    low_power_mode=st.sampled_from([None, False, True]),
)


OUTCOME = Outcome(loss=torch.tensor(1.0), grad_norm=None, marks=())


class Stage:
    """ThermalPolicy on a simulated clock; a rest takes no real time, and `while_resting` may change the readings."""

    def __init__(self, policy: str, *, while_resting=lambda stage: None) -> None:
        self.now, self.step = 1000.0, 0
        self.logged: list[tuple[float, str, dict]] = []
        self.saved: list[float] = []
        self.rests: list[float] = []
        self.while_resting = while_resting
        recorder = Recorder(
            None, FakeDevice(), on_event=lambda kind, fields: self.logged.append((self.now, kind, fields))
        )
        recorder.add_seconds = lambda phase, seconds: self.rests.append(seconds)
        self.thermal = ThermalPolicy(PLANS[policy], recorder, FakeDevice(), clock=lambda: self.now, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.while_resting(self)

    def live(self, reading: SystemState, *, seconds: float = 5.0, step_seconds: float = 0.1, steps: int = 20) -> None:
        """Some steps, and then a reading."""
        self.thermal.take_step_times(
            [(self.step + i, step_seconds * (1 + 0.01 * (i % 3))) for i in range(1, steps + 1)]
        )
        self.step += steps
        self.now += seconds
        self.thermal.take(reading)
        state = State(step=self.step)
        if self.thermal.after_step(state, OUTCOME).save:
            self.saved.append(self.now)
        # The next call rests, if that is needed.
        self.thermal.after_step(state, OUTCOME)

    def events(self, kind: str, about: str | None = None) -> list[tuple[float, dict]]:
        return [(at, f) for at, k, f in self.logged if k == kind and (about is None or f.get("cause") == about)]


# --- reports ---------------------------------------------------------------------------------------------------------


def test_slow_steps_are_reported_once_and_their_end_once() -> None:
    stage = Stage("warn")
    for count, factor in ((10, 1.0), (20, 1.35), (20, 1.0)):
        for _ in range(count):
            stage.live(SystemState(), step_seconds=0.1 * factor)
    (_, slow), (_, over) = stage.events("throttle", "heat")
    assert (slow["state"], over["state"]) == ("hot", "cool")
    assert slow["factor"] == pytest.approx(1.35, abs=0.02)
    assert abs(slow["since_step"] - 201) < 5
    assert "1.4x as long" in slow["reason"] or "1.3x as long" in slow["reason"]
    assert "no heat sensor" in slow["reason"]
    assert stage.rests == stage.saved == []


def test_a_nominal_sensor_means_slow_and_not_hot() -> None:
    for policy in PLANS:
        stage = Stage(policy)
        for factor in [1.0] * 10 + [1.5] * 20:
            stage.live(COOL, step_seconds=0.1 * factor)
        ((_, slow),) = stage.events("throttle", "heat")
        assert slow["state"] == "slow"
        assert "not heat" in slow["reason"]
        assert stage.rests == [], "resting would not help"


def test_battery_and_low_power_mode_are_reported_at_the_start_and_at_changes() -> None:
    stage = Stage("warn")
    battery = SystemState(power_source="battery", low_power_mode=False)
    for reading in (
        [battery] * 10 + [SystemState()] * 10 + [SystemState(power_source="mains", low_power_mode=True)] * 10
    ):
        stage.live(reading)
    first, second = (fields["reason"] for _, fields in stage.events("throttle", "power"))
    assert "on battery" in first
    assert first.count("low-power") == 0
    assert "on mains" in second
    assert "low-power mode is on" in second
    quiet = Stage("warn")
    quiet.live(SystemState(power_source="mains", low_power_mode=False))
    assert quiet.events("throttle") == []


def test_memory_pressure_is_reported_and_critical_pressure_saves_immediately() -> None:
    stage = Stage("warn")
    stage.live(SystemState(memory_pressure="warn", memory_available_bytes=2**30, swap_used_bytes=2**31))
    assert stage.saved == []
    stage.live(SystemState(memory_pressure="critical"))
    assert stage.saved == [stage.now], "the checkpoint does not wait, although the line does"
    began = stage.now
    while stage.now < began + PRESSURE_SAVE_SECONDS - 10:
        stage.live(SystemState(memory_pressure="critical"))
    assert len(stage.saved) == 1
    stage.live(SystemState(memory_pressure="critical"))
    stage.live(SystemState(memory_pressure="critical"))
    assert len(stage.saved) == 2
    reported = [fields for _, fields in stage.events("pressure")]
    assert [fields["level"] for fields in reported] == ["warn", "critical"]
    assert "1 GB left, 2 GB swapped out" in reported[0]["reason"]


# --- actions ---------------------------------------------------------------------------------------------------------


def test_pace_rests_a_share_of_the_time_more_while_hot_and_less_while_cool() -> None:
    stage = Stage("slow_down")
    stage.live(HOT)
    shares = []
    for reading in [HOT] * 60 + [COOL] * 60:
        before, rests = stage.now, len(stage.rests)
        stage.live(reading)
        rested = sum(stage.rests[rests:])
        shares.append(rested / (stage.now - before))
    assert shares[0] == pytest.approx(0.2, abs=0.04)
    assert max(shares) == pytest.approx(MAX_REST_SHARE, abs=0.04)
    assert shares[-1] == 0
    assert stage.saved == []


def test_pace_without_a_sensor_never_rests_much() -> None:
    stage = Stage("slow_down")
    for factor in [1.0] * 10 + [1.5] * 100:
        stage.live(SystemState(), step_seconds=0.1 * factor)
    assert 0 < sum(stage.rests) / (stage.now - 1050) < 0.25


def test_pause_saves_first_and_ends_when_the_sensor_is_back_to_normal() -> None:
    def cool_down(stage: Stage) -> None:
        assert len(stage.saved) == 1, "saved before the rest"
        stage.thermal.take(COOL if stage.now > 1205 else HOT)

    stage = Stage("pause", while_resting=cool_down)
    stage.live(HOT)
    assert stage.rests == [pytest.approx(200, abs=1)]
    hot, cool = (fields for _, fields in stage.events("throttle", "heat"))
    assert "saved, and paused" in hot["reason"]
    assert cool["state"] == "cool"
    assert cool["cooldown_seconds"] == stage.rests[0]
    stage.live(COOL)
    assert len(stage.rests) == 1


def test_a_pause_without_a_sensor_is_a_fixed_rest() -> None:
    stage = Stage("pause")
    for factor in [1.0] * 10 + [1.5] * 3:
        stage.live(SystemState(), step_seconds=0.1 * factor)
    assert stage.rests == [pytest.approx(REST_SECONDS_WITHOUT_SENSOR, abs=1)]
    assert stage.events("throttle", "heat")[1][1]["reason"] == "resumed after a rest of 2 min"


def test_a_machine_that_never_cools_down_still_trains() -> None:
    stage = Stage("pause")
    for _ in range(40):
        stage.live(HOT)
    assert all(rest == pytest.approx(MAX_REST_SECONDS, abs=1) for rest in stage.rests)
    assert len(stage.rests) == len(stage.saved) == 4, "a minute of training between two pauses"
    assert "still hot after a rest of 15 min" in stage.events("throttle", "heat")[1][1]["reason"]


def test_a_stop_request_ends_a_pause() -> None:
    for policy in ("slow_down", "pause"):
        stage = Stage(policy)
        stage.live(HOT, seconds=0.5)
        stage.thermal.should_stop = lambda: True
        rests = len(stage.rests)
        stage.live(HOT, seconds=100)
        assert sum(stage.rests[rests:]) == 0


@given(
    policy=st.sampled_from(sorted(PLANS)),
    life=st.lists(st.tuples(readings, st.floats(0.5, 60), st.sampled_from([0.1, 0.13, 0.2, 0.9])), max_size=60),
)
def test_the_thermal_state_changes_at_most_once_in_30_seconds_and_every_pause_ends_simulated(policy, life) -> None:
    stage, share_changes = Stage(policy), {}
    for reading, seconds, step_seconds in life:
        stage.live(reading, seconds=seconds, step_seconds=step_seconds)
        share_changes[stage.thermal._rest_share._changed_at] = stage.thermal._rest_share.value
    for times in (
        [at for at, _ in stage.events("throttle", "heat")],
        [at for at, _ in stage.events("throttle", "power")],
        [at for at, _ in stage.events("pressure")],
        list(share_changes),
    ):
        assert all(later - earlier >= DEBOUNCE_SECONDS for earlier, later in itertools.pairwise(times)), times
    assert all(rest <= MAX_REST_SECONDS + 1 for rest in stage.rests)
    if policy == "warn":
        assert stage.rests == []
    for _, fields in stage.events("throttle") + stage.events("pressure"):
        assert fields["reason"]


# --- in a session ----------------------------------------------------------------------------------------------------


class Simulated(ThermalPolicy):
    """Simulated sensors, step times and clock in a real session: each step brings the next reading."""

    life = ()
    every_seconds = 0.0

    def __init__(self, *arguments, **options) -> None:
        self._now = 0.0
        super().__init__(*arguments, clock=lambda: self._now, sleep=self._pass_time, **options)
        self._life = iter(self.life)

    def on_start(self, run) -> None:
        self.should_stop = lambda: run.is_stop_requested or run.state.is_finished

    def _pass_time(self, seconds: float) -> None:
        self._now += seconds

    def after_step(self, state: State, outcome: Outcome) -> Action:
        reading, step_seconds = next(self._life, (SystemState(), 0.1))
        self.take_step_times([(state.step, step_seconds)] * 40)
        self._pass_time(31.0)
        self.take(reading)
        return super().after_step(state, outcome)


def fit(run: Path | None = None, *, policy: str = "warn", **options) -> tuple[dict[str, torch.Tensor], list[float]]:
    """A small training with everything that draws: the final tensors, and the losses where there is a run folder."""
    torch.manual_seed(3)
    model = convnet(dropout=0.4)
    whet.train(
        model,
        images(64, seed=0),
        loss=lambda micro: nn.functional.cross_entropy(model(micro.x), micro.y),
        optimizer=whet.OptimizerChoice(lr=1e-2),
        run=run,
        on_event=None,
        overrides={"threads": 1, "micro_batch": 4, "on_heat": policy},
        measure=False,
        **{"global_batch_size": 8, "epochs": 2, "seed": 5, "ema": True, "clip": 1.0, **options},
    )
    losses = [] if run is None else [event.get("loss") for event in read_events(open_run(run), kinds=("step",))]
    return model.state_dict(), losses


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[dict[str, torch.Tensor], list[float]]:
    return fit(tmp_path_factory.mktemp("undisturbed") / "run")


def assert_same(result, expected) -> None:
    assert result[1] == expected[1]
    assert result[0].keys() == expected[0].keys()
    for name, tensor in expected[0].items():
        assert torch.equal(result[0][name], tensor), name


@settings(max_examples=amount(10, 50))
@given(
    policy=st.sampled_from(sorted(PLANS)),
    life=st.lists(st.tuples(readings, st.sampled_from([0.1, 0.13, 0.3])), min_size=16, max_size=16),
)
def test_training_is_bit_identical_under_any_simulated_sequence(policy, life, undisturbed, tmp_path_factory) -> None:
    Simulated.life = life
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whet.training.setup.ThermalPolicy", Simulated)
        result = fit(tmp_path_factory.mktemp("governed") / "run", policy=policy)
    assert_same(result, undisturbed)


def test_a_simulated_hot_run_pauses_saves_and_reports_it(tmp_path: Path, monkeypatch) -> None:
    """Guards the test above: the simulated sensors do reach the run."""
    Simulated.life = [(HOT, 0.1)] * 4 + [(SystemState(thermal="nominal", memory_pressure="critical"), 0.1)] * 12
    monkeypatch.setattr("whet.training.setup.ThermalPolicy", Simulated)
    fit(tmp_path / "run", policy="pause")
    report = whet.summarize(tmp_path / "run")
    assert {incident.kind for incident in report.incidents} == {"throttle", "pressure"}
    assert report.seconds["cooldown"] >= MAX_REST_SECONDS
    saved = [event.step for event in read_events(open_run(tmp_path / "run"), kinds=("checkpoint",))]
    assert saved[:2] == [0, 1], "before the pause"


def sensor_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "whet-sensors"]


def test_one_thread_watches_and_none_is_left(tmp_path: Path) -> None:
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with whet.Session(model, optimizer, images(16, seed=0), global_batch_size=8) as session:
        assert len(sensor_threads()) == 1
        for batch in session:
            session.step(lambda micro: model(micro.x).square().mean(), batch)
    assert sensor_threads() == []

    def broken(micro):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        whet.train(model, images(16, seed=0), loss=broken, optimizer=optimizer, global_batch_size=8, on_event=None)
    assert sensor_threads() == []
    with pytest.raises(whet.WhetError):
        fit(device="cuda")
    assert sensor_threads() == []


def test_a_reader_that_fails_does_not_end_a_run() -> None:
    asked = []

    def broken() -> SystemState:
        asked.append(1)
        raise OSError("no such sensor")

    fit(read_sensors=broken)
    assert asked


class Pictures(torch.utils.data.Dataset):
    """The same images, read one by one by workers."""

    def __init__(self) -> None:
        self.x, self.y = images(64, seed=0)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


def test_workers_fork_while_the_machine_is_read_all_the_time(monkeypatch) -> None:
    monkeypatch.setattr("whet.training.callbacks.thermal.READ_EVERY_SECONDS", 0.0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    whet.train(
        model,
        Pictures(),
        loss=lambda micro: nn.functional.cross_entropy(model(micro.x), micro.y),
        optimizer=whet.OptimizerChoice(lr=1e-2),
        on_event=None,
        global_batch_size=8,
        epochs=6,
        overrides={"threads": 1, "workers": 2, "worker_start_method": "fork"},
    )
    assert sensor_threads() == []


@pytest.mark.slow
def test_a_forked_child_can_leave() -> None:
    for _ in range(100):
        # The reader takes no time, so the thread often holds its lock when it is interrupted.
        with SensorThread(SystemState, lambda _reading: None, every_seconds=0.0) as thread:
            child = os.fork()
            if child == 0:
                thread.__exit__(None, None, None)
                os._exit(7)
            deadline = time.monotonic() + 120
            while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
                if time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    pytest.fail("the child hangs")
                time.sleep(0.002)
            assert os.waitstatus_to_exitcode(ended[1]) == 7


def test_ctrl_c_ends_a_real_pause_and_the_run_resumes_unchanged(tmp_path: Path, fork_server) -> None:
    """The sensor is simulated; process, signal, pause and clock are real. The pause would last 15 minutes."""
    assert fork_server.start(JOB, tmp_path / "whole").wait().code == 0
    # Slow, because the pause begins at the first step that ends 0.1 s after its announcement.
    process = fork_server.start(JOB, tmp_path / "paused", "--hot", "--slow", 'overrides={"on_heat": "pause"}')
    log, deadline = tmp_path / "paused" / "events.jsonl", time.monotonic() + TIMEOUT_SECONDS
    while not (log.exists() and b"paused until" in log.read_bytes()):
        assert time.monotonic() < deadline, "no pause"
        time.sleep(0.02)
    time.sleep(0.5)
    process.send(signal.SIGINT)
    sent = time.monotonic()
    assert process.wait().code == 130
    assert time.monotonic() - sent < 20, "a rest looks for Ctrl-C five times a second"
    assert whet.summarize(tmp_path / "paused").state == "stopped"
    assert fork_server.start(JOB, tmp_path / "paused", 'overrides={"on_heat": "warn"}').wait().code == 0, (
        "on_heat may change"
    )
    whole, paused = (
        [event.get("loss") for event in read_events(open_run(tmp_path / name), kinds=("step",))]
        for name in ("whole", "paused")
    )
    assert paused == whole


def test_step_times_exclude_data_evaluation_and_rests() -> None:
    device, seen = FakeDevice(), []
    recorder = Recorder(None, device)
    recorder.on_step_times = seen.extend
    for step in (1, 2):
        marks = []
        for phase, seconds in (("data", 50.0), ("forward", 0.25), ("backward", 0.5), ("forward", 0.25)):
            start = device.mark()
            device.pass_time(seconds)
            marks.append((phase, start, device.mark()))
        recorder.add_seconds("cooldown", 100.0)
        recorder.add_seconds("evaluate", 10.0)
        batch = GlobalBatch(ids=np.arange(1), after=Position(samples=step), is_last_of_epoch=False)
        outcome = Outcome(loss=torch.tensor(1.0), grad_norm=None, marks=tuple(marks))
        recorder.after_step(State(step=step, batch=batch), outcome)
    recorder.read()
    assert seen == [(1, 1.0), (2, 1.0)]


def test_on_heat_may_change_and_an_older_plan_resumes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    fit(run, epochs_per_session=1)
    saved = json.loads((run / "plan.json").read_text())
    del saved["settings"]["on_heat"], saved["overrides"]["on_heat"]
    (run / "plan.json").write_text(json.dumps(saved))
    fit(run, policy="slow_down", read_sensors=lambda: COOL)
    assert whet.summarize(run).state == "done"
    setting = json.loads((run / "plan.json").read_text())["settings"]["on_heat"]
    assert (setting["value"], setting["source"]) == ("slow_down", "you")


# --- on the screen ---------------------------------------------------------------------------------------------------


def test_the_line_shows_cool_and_hot() -> None:
    screen = io.StringIO()
    line = ProgressLine("text", stream=screen)

    def last_words() -> str:
        line._shown_at = -1e9
        line("step", {"step": 9, "samples": 9, "epoch": 0, "loss": 0.5})
        return screen.getvalue().splitlines()[-1].split("  ")[-1]

    stage = Stage("warn")
    for factor in [1.0] * 10 + [1.3] * 10 + [1.0] * 10:
        stage.live(SystemState(thermal="nominal" if factor == 1 else "moderate"), step_seconds=0.1 * factor)
    shown = []
    for _, kind, fields in stage.logged:
        line(kind, fields)
        shown.append(last_words())
    assert shown == ["cool", "hot 1.3x slower", "cool"]
    reported = screen.getvalue()
    assert "text: steps take 1.3x as long since step 2" in reported
    assert "the machine is hot (thermal pressure moderate)" in reported
    line("throttle", {"step": 9, "cause": "heat", "state": "hot", "thermal": "heavy", "reason": "by the sensor"})
    assert last_words() == "hot"
    unseen = {"step": 9, "cause": "heat", "reason": "no sensor"}
    line("throttle", {**unseen, "state": "hot", "factor": 1.62})
    assert last_words() == "1.6x slower", "the cause may not be heat"
    line("throttle", {**unseen, "state": "cool"})
    assert last_words().endswith("samples/s")
    line("throttle", {"step": 9, "cause": "heat", "state": "hot", "thermal": "heavy", "reason": "by the sensor"})
    line("pressure", {"step": 9, "level": "warn", "reason": "memory is short"})
    assert last_words() == "hot"
