"""Paired timing of two settings: steps on the same batches in random order until the result is clear."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from whet.autotune.statistics import MOST_PAIRS, Decision, SpeedupEstimate, decide, estimate, is_steady
from whet.autotune.step_bench import PreparedStep

HOPELESS = 20.0
"""So many times slower in its first step, and a rival is stopped."""

_LEAST_VISIT = 0.02
"""Seconds: shorter steps are timed several at a time, since a clock and a scheduler disturb them too much."""
_MOST_STEPS = 16
_WARM_BELOW = 0.25
"""Seconds: the first pair of shorter steps is not counted. Longer ones have warmed up in their preparation."""
_MARGIN, _FIRST_MARGIN = 1.25, 1.6
"""A step may take so many times the longest before it, the first few more; what could end too late is not begun."""
_FEW = 3
_PAIRS_HOPED_FOR = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedTiming:
    """What came out, from our side."""

    answer: Literal["faster", "no gain", "unclear", "cut off"]
    log_ratios: tuple[float, ...]
    """Our time over the rival's, one number for each pair that counts."""
    our_seconds: float
    """The median of one step."""
    their_seconds: float
    is_quiet: bool
    """Whether the rival's own time stayed the same from the first half to the second."""

    @property
    def estimate(self) -> SpeedupEstimate | None:
        """The speed-up with its interval; None where no pair counts."""
        return estimate(self.log_ratios) if self.log_ratios else None


def compare(
    ours: PreparedStep,
    theirs: PreparedStep,
    *,
    clock: Callable[[], float],
    until: float,
    coin: random.Random,
    most_pairs: int = MOST_PAIRS,
    tick: Callable[[], None] | None = None,
) -> PairedTiming:
    """A duel that ends when the answer is clear, after `most_pairs`, or before `until` on the clock.

    A-B-B-A would cancel a steady drift, but not a disturbance that returns every fourth step; an order that is tossed
    for each pair favours nobody under either.
    """
    quick, both = min(ours.step_seconds, theirs.step_seconds), ours.step_seconds + theirs.step_seconds
    # Where one is far slower than the other, many steps of both would leave no time for pairs.
    affordable = (until - clock()) / (_FIRST_MARGIN * _PAIRS_HOPED_FOR * max(both, 1e-9))
    steps = max(1, min(_steps_per_visit(quick), int(min(affordable, _MOST_STEPS))))
    us, them = _TimedSide(ours, steps), _TimedSide(theirs, steps)
    log_ratios: list[float] = []
    answer: Decision = "open"
    is_warm = min(ours.step_seconds, theirs.step_seconds) >= _WARM_BELOW
    batch = 0
    while answer == "open" and len(log_ratios) < most_pairs:
        if clock() + us.next_cost + them.next_cost > until:
            break
        order = (us, them) if coin.random() < 0.5 else (them, us)
        for side in order:
            side.visit(batch)
        if tick is not None:
            tick()
        batch += steps
        log_ratio = math.log(us.seconds[-1] / them.seconds[-1])
        if batch == steps and log_ratio >= math.log(HOPELESS):
            return _outcome("cut off", [log_ratio], us, them)
        if not is_warm:
            is_warm = True
            us.forget()
            them.forget()
            continue
        log_ratios.append(log_ratio)
        answer = decide(log_ratios)
    if not log_ratios and ours.step_seconds >= HOPELESS * theirs.step_seconds:
        # There was no time for even one of its steps, and the last of its preparation says why.
        return _outcome("cut off", [math.log(ours.step_seconds / theirs.step_seconds)], us, them)
    return _outcome("unclear" if answer == "open" else answer, log_ratios, us, them)


def _steps_per_visit(step_seconds: float) -> int:
    return max(1, min(_MOST_STEPS, math.ceil(_LEAST_VISIT / max(step_seconds, 1e-9))))


@dataclass(slots=True)
class _TimedSide:
    """One of the two, with the times of its visits."""

    prepared: PreparedStep
    steps: int
    seconds: list[float] = field(default_factory=list)
    """Of one step, the mean of each visit."""
    longest: float = 0.0

    def visit(self, first: int) -> None:
        total = sum(self.prepared.step(first + place) for place in range(self.steps))
        # A clock that stood still would make a ratio of zero.
        self.seconds.append(max(total / self.steps, 1e-9))
        self.longest = max(self.longest, self.seconds[-1])

    def forget(self) -> None:
        self.seconds.clear()

    @property
    def next_cost(self) -> float:
        margin = _MARGIN if len(self.seconds) >= _FEW else _FIRST_MARGIN
        return margin * self.steps * max(self.longest, self.prepared.step_seconds)


def _outcome(
    answer: Literal["faster", "no gain", "unclear", "cut off"],
    log_ratios: list[float],
    us: _TimedSide,
    them: _TimedSide,
) -> PairedTiming:
    return PairedTiming(
        answer=answer,
        log_ratios=tuple(log_ratios),
        our_seconds=median(us.seconds or [us.prepared.step_seconds]),
        their_seconds=median(them.seconds or [them.prepared.step_seconds]),
        is_quiet=is_steady([math.log(seconds) for seconds in them.seconds]),
    )
