"""Paired timing of two settings: steps on the same batches in random order until the result is clear."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Literal

from whet.autotune.statistics import (
    MAX_PAIRS,
    MAX_STEPS_PER_VISIT,
    Decision,
    SpeedupEstimate,
    decide,
    estimate,
    is_stable,
    steps_per_visit,
)
from whet.autotune.step_bench import PreparedStep

# A candidate that is this many times slower in its first step is stopped.
HOPELESS = 20.0

# The first pair of shorter steps does not count. Longer steps have warmed up in their preparation.
_WARM_SECONDS = 0.25
# A step may take this many times the longest so far, the first few more; one that could end too late is not begun.
_MARGIN, _FIRST_MARGIN = 1.25, 1.6
_FEW_VISITS = 3
_TARGET_PAIRS = 8

TimingOutcome = Literal["faster", "no gain", "unclear", "cut off"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedTiming:
    """The result of timing a candidate against a baseline."""

    outcome: TimingOutcome
    log_ratios: tuple[float, ...]
    """The candidate's time over the baseline's, one value per counted pair."""
    candidate_seconds: float
    """The median of one step."""
    baseline_seconds: float
    is_stable: bool
    """Whether the baseline took as long in the second half as in the first."""

    @property
    def estimate(self) -> SpeedupEstimate | None:
        """The speedup with its interval; None without a counted pair."""
        return estimate(self.log_ratios) if self.log_ratios else None


def compare(
    candidate: PreparedStep,
    baseline: PreparedStep,
    *,
    clock: Callable[[], float],
    until: float,
    random_order: random.Random,
    max_pairs: int = MAX_PAIRS,
    tick: Callable[[], None] | None = None,
) -> PairedTiming:
    """Time pairs of steps until the result is clear, for `max_pairs` at most, and not beyond `until` on the clock.

    The order of each pair is random. A fixed A-B-B-A order would cancel a steady drift, but not a disturbance that
    returns every fourth step; a random order favors neither side under both.
    """
    quickest = min(candidate.step_seconds, baseline.step_seconds)
    a_pair = candidate.step_seconds + baseline.step_seconds
    # If one side is far slower, visits of many steps would leave no time for enough pairs.
    affordable = (until - clock()) / (_FIRST_MARGIN * _TARGET_PAIRS * max(a_pair, 1e-9))
    steps = max(1, min(steps_per_visit(quickest), int(min(affordable, MAX_STEPS_PER_VISIT))))
    ours, theirs = _TimedSide(candidate, steps), _TimedSide(baseline, steps)
    log_ratios: list[float] = []
    decision: Decision = "open"
    is_warm = quickest >= _WARM_SECONDS
    batch = 0
    while decision == "open" and len(log_ratios) < max_pairs:
        if clock() + ours.next_seconds + theirs.next_seconds > until:
            break
        order = (ours, theirs) if random_order.random() < 0.5 else (theirs, ours)
        for side in order:
            side.visit(batch)
        if tick is not None:
            tick()
        batch += steps
        log_ratio = math.log(ours.visits[-1] / theirs.visits[-1])
        if batch == steps and log_ratio >= math.log(HOPELESS):
            return _result("cut off", [log_ratio], ours, theirs)
        if not is_warm:
            is_warm = True
            ours.visits.clear()
            theirs.visits.clear()
            continue
        log_ratios.append(log_ratio)
        decision = decide(log_ratios)
    if not log_ratios and candidate.step_seconds >= HOPELESS * baseline.step_seconds:
        # There was no time for even one of its steps, and the last step of its preparation shows why.
        return _result("cut off", [math.log(candidate.step_seconds / baseline.step_seconds)], ours, theirs)
    return _result("unclear" if decision == "open" else decision, log_ratios, ours, theirs)


class _TimedSide:
    """One side of a comparison."""

    def __init__(self, prepared: PreparedStep, steps: int) -> None:
        self.prepared, self.steps = prepared, steps
        self.visits: list[float] = []
        """Seconds per step, the mean of each counted visit."""
        self._longest = 0.0

    def visit(self, first: int) -> None:
        total = sum(self.prepared.step(first + offset) for offset in range(self.steps))
        # A clock that stands still would give a ratio of zero.
        self.visits.append(max(total / self.steps, 1e-9))
        self._longest = max(self._longest, self.visits[-1])

    @property
    def next_seconds(self) -> float:
        """How long the next visit may take."""
        margin = _MARGIN if len(self.visits) >= _FEW_VISITS else _FIRST_MARGIN
        return margin * self.steps * max(self._longest, self.prepared.step_seconds)

    @property
    def median_seconds(self) -> float:
        return median(self.visits or [self.prepared.step_seconds])


def _result(outcome: TimingOutcome, log_ratios: list[float], ours: _TimedSide, theirs: _TimedSide) -> PairedTiming:
    return PairedTiming(
        outcome=outcome,
        log_ratios=tuple(log_ratios),
        candidate_seconds=ours.median_seconds,
        baseline_seconds=theirs.median_seconds,
        is_stable=is_stable([math.log(seconds) for seconds in theirs.visits]),
    )
