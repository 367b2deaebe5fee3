"""Slowdowns are detected in real step times, and quiet runs raise no alarm; slowdowns are simulated."""

import random
import sys

import pytest

from fake_device import FakeDevice
from paths import ROOT, SUPPORT
from whet.training.callbacks.drift import BASELINE_WINDOW, WARMUP_STEPS, WINDOW, Slowdown, SlowdownDetector

pytestmark = pytest.mark.torch

sys.path.insert(0, str(ROOT / "benchmarks"))
from step_drift import STARTS, draw, first_report, read, slowed  # noqa: E402

QUIET = read(SUPPORT / "recordings" / "steps" / "step_seconds.txt")
DISTURBED = read(SUPPORT / "recordings" / "steps" / "step_seconds_disturbed.txt")
SEEDS = range(20)


def on_fake_clock(seconds) -> list[float]:
    """Run the detector on a simulated clock with these step times."""
    device, seen = FakeDevice(), []
    for value in seconds:
        start = device.mark()
        device.pass_time(value)
        seen.append(device.elapsed_seconds(start, device.mark()))
    return seen


@pytest.mark.parametrize("seed", SEEDS)
def test_a_quiet_run_of_500_steps_raises_no_alarm(seed: int) -> None:
    assert first_report(on_fake_clock(draw(QUIET, 500, seed=seed))) is None


@pytest.mark.parametrize("ramp", [1, 30], ids=["at-once", "over-30-steps"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_simulated_slow_down_of_30_percent_is_reported_within_60_steps(seed: int, ramp: int) -> None:
    for start in STARTS:
        seconds = slowed(draw(QUIET, start + 60, seed=seed), factor=1.3, start=start, ramp=ramp)
        seen = first_report(on_fake_clock(seconds))
        assert seen is not None, f"slow from step {start} on, and not seen 60 steps later"
        assert seen >= start, "an alarm before anything happened"


def test_simulated_spikes_are_no_slow_down() -> None:
    """Three steps in a hundred take five times as long: an evaluation, a garbage collection, another process."""
    for seed in SEEDS:
        chance = random.Random(seed)
        seconds = [value * (5 if chance.random() < 0.03 else 1) for value in draw(QUIET, 500, seed=seed)]
        assert first_report(seconds) is None, seed


def test_a_real_busy_process_is_reported() -> None:
    """A limit of the detector: other programs that use the cores look like heat."""
    assert first_report(DISTURBED) is not None


def test_a_slowdown_has_a_factor_a_start_and_an_end() -> None:
    drift, reported = SlowdownDetector(), {}
    for step in range(1, 601):
        verdict = drift.observe(step, 0.02 * (1.5 if 200 < step <= 400 else 1.0) * (1 + 0.01 * (step % 3)))
        reported[step] = verdict
    first = next(step for step, verdict in reported.items() if verdict)
    assert 200 < first <= 200 + WINDOW
    assert reported[first].since_step in range(199, 205)
    assert reported[300] == Slowdown(factor=pytest.approx(1.5, abs=0.02), since_step=reported[first].since_step)
    assert reported[400] is not None
    assert reported[400 + WINDOW + 8] is None, "cool again"
    assert reported[600] is None


def test_the_first_steps_and_impossible_times_are_ignored() -> None:
    drift = SlowdownDetector()
    for step in range(WARMUP_STEPS):
        drift.observe(step, 9.0)
    for value in (0.0, -1.0, float("nan"), float("inf")):
        assert drift.observe(1, value) is None
    for step in range(BASELINE_WINDOW - 8):
        drift.observe(step, 0.01)
    assert all(drift.observe(step, 0.09) is None for step in range(8)), "nothing to compare with yet"


def test_twice_the_work_in_twice_the_time_is_not_slower() -> None:
    drift = SlowdownDetector()
    for step in range(1, 400):
        work = 2.0 if step > 200 else 1.0
        assert drift.observe(step, 0.01 * work * (1 + 0.01 * (step % 2)), work=work) is None


def test_after_a_break_the_steps_before_it_do_not_count_and_the_baseline_does() -> None:
    drift = SlowdownDetector()
    for step in range(300):
        drift.observe(step, 0.01 if step < 150 else 0.02)
    assert drift.verdict is not None
    drift.forget_recent()
    assert drift.verdict is None
    for step in range(300, 300 + WINDOW + 8):
        drift.observe(step, 0.02)
    assert drift.verdict is not None
    assert drift.verdict.factor == pytest.approx(2.0, abs=0.01)


def test_a_machine_that_was_slow_at_first_finds_its_baseline_later() -> None:
    drift = SlowdownDetector()
    for step in range(200):
        assert drift.observe(step, 0.02) is None
    for step in range(200, 400):
        assert drift.observe(step, 0.01) is None
    for step in range(400, 400 + WINDOW):
        drift.observe(step, 0.0135)
    assert drift.verdict is not None
