"""False claims and coverage of the statistics under several kinds of simulated noise."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amounts import amount
from paths import ReportCount
from simulated_step_bench import Noise, SimulatedStepBench, drifting, gaussian, heavy_tailed, periodic
from whet.autotune import statistics
from whet.autotune.paired_timing import compare
from whet.autotune.statistics import decide, estimate, is_slower, is_stable, upper_bound
from whet.machine.known import load_machine
from whet.plan.plan import Plan, make_plan
from whet.recipes.text.config import TextConfig, describe

PLAN = make_plan(load_machine("linux-2core"), describe(TextConfig()))
NOISES = {
    "gaussian 3 %": gaussian(0.03),
    "gaussian 15 %": gaussian(0.15),
    "heavy tails": heavy_tailed,
    "busy cores": lambda _now, draw: math.exp(draw.gauss(0, 1)),
    "one of two speeds": lambda _now, draw: draw.choice((1.0, 50.0)),
    "drift": drifting,
    "every 4th step": periodic(0.2),
    "every 7th step": periodic(0.35),
    "every 20th step": periodic(1.0),
}


def duel_of(noise: Noise, seed: int, *, gain: float = 0.0, seconds: float = 0.05) -> tuple[str, float]:
    """Time two equal settings, or one against a baseline that is slower by `gain`."""

    def true(plan: Plan) -> float:
        return seconds if plan.optimizer_kernels == "loop" else seconds * (1 + gain)

    bench = SimulatedStepBench(PLAN, true, noise=noise, seed=seed)
    ours, theirs = (bench.prepare({"optimizer_kernels": how}, seconds=60) for how in ("loop", "fused"))
    comparison = compare(ours, theirs, clock=bench.clock, until=math.inf, random_order=random.Random(seed))
    return comparison.outcome, comparison.estimate.speedup if comparison.estimate else math.nan


@pytest.mark.parametrize("noise", NOISES)
def test_at_most_one_false_claim_in_200_simulated_null_comparisons(noise: str, report_count: ReportCount) -> None:
    comparisons = amount(100, 1000)
    claims = sum(duel_of(NOISES[noise], seed)[0] == "faster" for seed in range(comparisons))
    report_count(f"{noise}: {claims} false claims in {comparisons} comparisons between equals")
    assert claims <= comparisons / 200


@pytest.mark.parametrize(("noise", "gain"), [("gaussian 3 %", 0.1), ("heavy tails", 0.2), ("drift", 0.05)])
def test_simulated_gains_above_the_noise_are_found(noise: str, gain: float, report_count: ReportCount) -> None:
    answers = [duel_of(NOISES[noise], seed, gain=gain)[0] for seed in range(100)]
    report_count(f"{noise}: {answers.count('faster')} of 100 gains of {gain:.0%} were found")
    assert answers.count("faster") >= 75


def test_probabilities_of_all_looks_sum_to_less_than_1_in_200() -> None:
    real = sum(
        sum(math.comb(pairs, heads) for heads in range((statistics._max_trimmed(pairs, level) or 0) + 1)) / 2**pairs
        for pairs, level in statistics._LOOKS.items()
    )
    assert real <= 1 / 200
    assert all(statistics._max_trimmed(pairs, level) is not None for pairs, level in statistics._LOOKS.items())


@given(st.lists(st.floats(-1, 1, allow_subnormal=False), min_size=1, max_size=9), st.floats(0.001, 0.5))
def test_upper_bound_has_its_stated_level(sizes: list[float], level: float) -> None:
    """For random signs of any values, the bound is below zero with probability `level` at most."""
    tosses = list(itertools.product((-1, 1), repeat=len(sizes)))
    below = sum(
        upper_bound([s * abs(v) for s, v in zip(signs, sizes, strict=True)], level=level) < 0 for signs in tosses
    )
    assert below <= level * len(tosses)


def test_speedup_interval_has_its_stated_coverage() -> None:
    draw, inside = random.Random(1), 0
    for _ in range(1000):
        result = estimate([draw.gauss(-0.1, 0.05) for _ in range(8)])
        inside += result.low <= math.exp(0.1) <= result.high
        assert result.low <= result.speedup <= result.high
    assert result.confidence == pytest.approx(1 - 2 / 32)
    assert inside >= 920


def test_interval_of_few_pairs_is_their_range() -> None:
    result = estimate([math.log(0.5), math.log(0.25), math.log(1.0)])
    assert (result.low, result.speedup, result.high) == pytest.approx((1.0, 2.0, 4.0))
    assert result.confidence == 0.75


def test_no_claim_with_few_pairs_or_a_tiny_gain() -> None:
    assert decide([-0.2]) == decide([-0.2] * 7) == "open"
    assert decide([-0.2] * 8) == "faster"
    assert decide([-0.015] * 8) == "no gain", "1.5 % is real and not worth having"
    assert decide([-0.3] * 4) == "open"
    assert decide([-0.3] * 5) == "faster"
    assert decide([0.0, 0.0]) == "open"
    assert decide([0.0, 0.0, 0.0]) == "no gain"


def test_slower_means_beyond_the_spread() -> None:
    assert is_slower([0.04, 0.05, 0.04])
    assert not is_slower([0.01, 0.20, 0.02])
    assert not is_slower([0.005, 0.005, 0.005])
    assert not is_slower([-0.1, 0.1, 0.1])


def test_unstable_ratio_needs_more_pairs() -> None:
    changing = [-0.6] * 2 + [-0.5] * 2 + [-0.2] * 2 + [-0.1] * 2
    assert not is_stable(changing)
    assert decide(changing) == "open"
    assert decide(sorted(changing)[::2] + sorted(changing)[1::2]) == "faster"
