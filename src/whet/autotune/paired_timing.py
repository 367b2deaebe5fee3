"""Paired timing of two settings: steps on the same batches, in random order, until the result is clear."""

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

# Stop timing a candidate whose first step is this many times slower.
HOPELESS = 20.0

# If steps are shorter than this, the first pair is discarded as warm-up. Longer steps have warmed up during
# preparation.
_WARM_SECONDS = 0.25
# Expected maximum time of a visit relative to the longest one so far, with a larger margin for the first visits, which
# vary most. A visit that may end after the deadline is skipped.
_MARGIN, _FIRST_MARGIN = 1.25, 1.6
_FEW_VISITS = 3
# Take at least eight pairs, after which the sequential test can claim a gain.
_TARGET_PAIRS = 8

TimingOutcome = Literal["faster", "no gain", "unclear", "cut off"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedTiming:
    """The result of timing a candidate against a baseline."""

    outcome: TimingOutcome
    log_ratios: tuple[float, ...]
    """Logarithm of the candidate's time divided by the baseline's, one value per counted pair."""
    candidate_seconds: float
    """Median seconds of one step of the candidate."""
    baseline_seconds: float
    is_stable: bool
    """Whether the baseline was equally fast in both halves of the comparison."""

    @property
    def estimate(self) -> SpeedupEstimate | None:
        """The speedup with its confidence interval, or None without a counted pair."""
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
    """Time pairs of steps until the result is clear, up to `max_pairs` pairs or `until` on the clock.

    The order within each pair is random. A fixed A-B-B-A order would cancel a steady drift, but not a disturbance that
    occurs every fourth step. A random order is unbiased in both cases.
    """
    quickest = min(candidate.step_seconds, baseline.step_seconds)
    a_pair = candidate.step_seconds + baseline.step_seconds
    # If one side is far slower, limit the steps per visit so that the target number of pairs fits into the time left.
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
        # Both sides run the same batches, so the content of a batch favors neither.
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
        # There was no time for a single pair. The last step of the preparation already shows that the candidate is too
        # slow.
        return _result("cut off", [math.log(candidate.step_seconds / baseline.step_seconds)], ours, theirs)
    return _result("unclear" if decision == "open" else decision, log_ratios, ours, theirs)


class _TimedSide:
    """One side of a paired timing: a prepared step and its timed visits."""

    def __init__(self, prepared: PreparedStep, steps: int) -> None:
        self.prepared, self.steps = prepared, steps
        self.visits: list[float] = []
        """Mean seconds per step of each counted visit."""
        self._longest = 0.0

    def visit(self, first: int) -> None:
        """Time a few consecutive steps, starting with the batch of index `first`."""
        total = sum(self.prepared.step(first + offset) for offset in range(self.steps))
        # A coarse clock may report zero, which has no logarithm.
        self.visits.append(max(total / self.steps, 1e-9))
        self._longest = max(self._longest, self.visits[-1])

    @property
    def next_seconds(self) -> float:
        """Expected maximum duration of the next visit in seconds."""
        margin = _MARGIN if len(self.visits) >= _FEW_VISITS else _FIRST_MARGIN
        return margin * self.steps * max(self._longest, self.prepared.step_seconds)

    @property
    def median_seconds(self) -> float:
        """Median seconds of one step, taken from the preparation if no visit counted."""
        return median(self.visits or [self.prepared.step_seconds])


def _result(outcome: TimingOutcome, log_ratios: list[float], ours: _TimedSide, theirs: _TimedSide) -> PairedTiming:
    return PairedTiming(
        outcome=outcome,
        log_ratios=tuple(log_ratios),
        candidate_seconds=ours.median_seconds,
        baseline_seconds=theirs.median_seconds,
        is_stable=is_stable([math.log(seconds) for seconds in theirs.visits]),
    )
