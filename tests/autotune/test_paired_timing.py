"""Duels between simulated rivals: fair under drift, short where the answer is clear, never past their time."""

import math
import random
from statistics import median

import pytest

from simulated_step_bench import SimulatedRig, drifting, gaussian
from whet.autotune.paired_timing import PairedTiming, compare
from whet.machine.known import load_machine
from whet.plan.plan import make_plan
from whet.recipes.text.config import TextConfig, describe

PLAN = make_plan(load_machine("linux-2core"), describe(TextConfig()))


def duel(rig: SimulatedRig, *, until: float = math.inf, seed: int = 0) -> PairedTiming:
    ours, theirs = (rig.prepare({"precision": how}, seconds=60) for how in ("bf16", "fp32"))
    return compare(ours, theirs, clock=rig.clock, until=until, random_order=random.Random(seed))


def rig_of(bf16: float, fp32: float = 0.1, **more) -> SimulatedRig:
    return SimulatedRig(PLAN, lambda plan: bf16 if plan.precision == "bf16" else fp32, **more)


def test_a_simulated_drift_fools_blocks_and_not_pairs() -> None:
    """Ten steps of one, then ten of the other, as people do it: the second looks slower. Pairs see two equals."""
    rig = rig_of(0.1, noise=drifting, batch_spread=0.0)
    first, second = ([rig.make_step({"precision": how}, i) for i in range(30)] for how in ("bf16", "fp32"))
    assert median(second) / median(first) > 1.05, "the drift must be large enough to fool somebody"
    found = duel(rig_of(0.1, noise=drifting)).estimate
    assert found is not None
    assert found.low <= 1.0 <= found.high
    assert abs(found.speedup - 1) < 0.02


def test_a_simulated_hopeless_rival_is_cut_off_after_its_first_step() -> None:
    rig = rig_of(6.0)
    result = duel(rig)
    assert result.outcome == "cut off"
    assert rig.steps == 4, "one step each in the preparations, and one pair"
    assert result.estimate is not None
    assert 1 / result.estimate.speedup == pytest.approx(60, rel=0.01)


def test_a_simulated_hopeless_rival_is_not_even_stepped_where_time_is_short() -> None:
    rig = rig_of(6.0)
    result = duel(rig, until=8.0)
    assert (result.outcome, rig.steps) == ("cut off", 2)


def test_a_simulated_rival_that_is_far_faster_is_not_kept_from_its_pairs_by_the_slow_one() -> None:
    """Busy cores: a step of 2 ms with one thread, of 200 ms with two. 16 steps of both would be 5 seconds a pair."""
    rig = rig_of(0.002, 0.2)
    result = duel(rig, until=5.0)
    assert result.outcome == "faster"
    assert rig.clock() <= 5.0


def test_a_simulated_clear_answer_is_quick_and_a_close_one_takes_longer() -> None:
    assert len(duel(rig_of(0.05)).log_ratios) == 5
    assert len(duel(rig_of(0.2)).log_ratios) == 3
    close = duel(rig_of(0.0935, noise=gaussian(0.03)))
    assert len(close.log_ratios) >= 8


def test_simulated_short_steps_are_timed_many_at_a_time_and_the_first_pair_does_not_count() -> None:
    rig = rig_of(0.0005, 0.001)
    result = duel(rig)
    assert (result.outcome, len(result.log_ratios)) == ("faster", 5)
    assert rig.steps == 2 + 2 * 16 * (5 + 1)


def test_simulated_long_steps_all_count() -> None:
    rig = rig_of(1.0, 2.0)
    assert (duel(rig).outcome, rig.steps) == ("faster", 2 + 2 * 5)


@pytest.mark.parametrize("seconds", [3.0, 5.0, 9.0, 20.0])
def test_a_simulated_duel_ends_in_time(seconds: float) -> None:
    rig = rig_of(0.5, 0.6, noise=gaussian(0.05), batch_spread=0.1)
    duel(rig, until=seconds)
    assert rig.now <= seconds


def test_the_same_seed_makes_the_same_simulated_duel_and_orders_are_tossed() -> None:
    first, second = (duel(rig_of(0.09, noise=gaussian(0.05)), seed=3) for _ in range(2))
    assert first == second
    order: list[str] = []

    class Listed(SimulatedRig):
        def make_step(self, settings, index):
            order.append(str(settings["precision"]))
            return super().make_step(settings, index)

    rig = Listed(PLAN, lambda _plan: 0.3, noise=gaussian(0.2))
    duel(rig, seed=3)
    pairs = list(zip(order[2::2], order[3::2], strict=True))
    assert {("bf16", "fp32"), ("fp32", "bf16")} == set(pairs), "both orders occur, and each pair has both sides"


def test_a_simulated_machine_that_gets_slower_is_said_to_be_not_quiet() -> None:
    result = duel(rig_of(0.3, 0.34, noise=lambda now, _draw: 1 + 0.1 * now, batch_spread=0.0))
    assert result.outcome == "faster", "both are hit alike"
    assert not result.is_stable
