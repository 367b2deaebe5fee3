"""Paired timing on simulated benches: unbiased under drift, short for clear results, never past its time limit."""

import math
import random
from statistics import median

import pytest

from simulated_step_bench import SimulatedStepBench, drifting, gaussian
from whet.autotune.paired_timing import PairedTiming, compare
from whet.machine.known import load_machine
from whet.plan.plan import make_plan
from whet.recipes.text.config import TextConfig, describe

PLAN = make_plan(load_machine("linux-2core"), describe(TextConfig()))


def time_pair(bench: SimulatedStepBench, *, until: float = math.inf, seed: int = 0) -> PairedTiming:
    ours, theirs = (bench.prepare({"precision": how}, seconds=60) for how in ("bf16", "fp32"))
    return compare(ours, theirs, clock=bench.clock, until=until, random_order=random.Random(seed))


def simulated_bench(bf16: float, fp32: float = 0.1, **more) -> SimulatedStepBench:
    return SimulatedStepBench(PLAN, lambda plan: bf16 if plan.precision == "bf16" else fp32, **more)


def test_simulated_drift_biases_blocks_and_not_pairs() -> None:
    """Timing ten steps of one and then ten of the other makes the second look slower under drift. Pairs do not."""
    bench = simulated_bench(0.1, noise=drifting, batch_spread=0.0)
    first, second = ([bench.make_step({"precision": how}, i) for i in range(30)] for how in ("bf16", "fp32"))
    assert median(second) / median(first) > 1.05, "the drift must be large enough to mislead"
    actual = time_pair(simulated_bench(0.1, noise=drifting)).estimate
    assert actual is not None
    assert actual.low <= 1.0 <= actual.high
    assert abs(actual.speedup - 1) < 0.02


def test_hopeless_simulated_candidate_is_stopped_after_its_first_step() -> None:
    bench = simulated_bench(6.0)
    result = time_pair(bench)
    assert result.outcome == "cut off"
    assert bench.steps == 4, "one step each in the preparations, and one pair"
    assert result.estimate is not None
    assert 1 / result.estimate.speedup == pytest.approx(60, rel=0.01)


def test_hopeless_simulated_candidate_is_not_stepped_without_time() -> None:
    bench = simulated_bench(6.0)
    result = time_pair(bench, until=8.0)
    assert (result.outcome, bench.steps) == ("cut off", 2)


def test_slow_simulated_baseline_leaves_time_for_enough_pairs() -> None:
    """Busy cores: a step takes 2 ms with one thread and 200 ms with two. 16 steps of each would take 5 s per pair."""
    bench = simulated_bench(0.002, 0.2)
    result = time_pair(bench, until=5.0)
    assert result.outcome == "faster"
    assert bench.clock() <= 5.0


def test_clear_simulated_results_need_few_pairs_and_close_ones_more() -> None:
    assert len(time_pair(simulated_bench(0.05)).log_ratios) == 5
    assert len(time_pair(simulated_bench(0.2)).log_ratios) == 3
    close = time_pair(simulated_bench(0.0935, noise=gaussian(0.03)))
    assert len(close.log_ratios) >= 8


def test_short_simulated_steps_are_timed_in_groups_after_a_warm_up() -> None:
    bench = simulated_bench(0.0005, 0.001)
    result = time_pair(bench)
    assert (result.outcome, len(result.log_ratios)) == ("faster", 5)
    # 34 steps of the first batch, 0.6 ms each, take 20 ms.
    assert bench.steps == 2 + 2 * 34 * (5 + 1)


def test_long_simulated_steps_all_count() -> None:
    bench = simulated_bench(1.0, 2.0)
    assert (time_pair(bench).outcome, bench.steps) == ("faster", 2 + 2 * 5)


@pytest.mark.parametrize("seconds", [3.0, 5.0, 9.0, 20.0])
def test_simulated_comparison_ends_in_time(seconds: float) -> None:
    bench = simulated_bench(0.5, 0.6, noise=gaussian(0.05), batch_spread=0.1)
    time_pair(bench, until=seconds)
    assert bench.now <= seconds


def test_simulated_comparison_is_reproducible_and_its_order_is_random() -> None:
    first, second = (time_pair(simulated_bench(0.09, noise=gaussian(0.05)), seed=3) for _ in range(2))
    assert first == second
    order: list[str] = []

    class Listed(SimulatedStepBench):
        def make_step(self, settings, index):
            order.append(str(settings["precision"]))
            return super().make_step(settings, index)

    bench = Listed(PLAN, lambda _plan: 0.3, noise=gaussian(0.2))
    time_pair(bench, seed=3)
    pairs = list(zip(order[2::2], order[3::2], strict=True))
    assert {("bf16", "fp32"), ("fp32", "bf16")} == set(pairs), "both orders occur, and each pair has both sides"


def test_simulated_machine_that_slows_down_is_unstable() -> None:
    result = time_pair(simulated_bench(0.3, 0.34, noise=lambda now, _draw: 1 + 0.1 * now, batch_spread=0.0))
    assert result.outcome == "faster", "both are affected equally"
    assert not result.is_stable
