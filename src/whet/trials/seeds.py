"""The best few once more with seeds that the search has not seen: what seeds alone change must not decide a winner."""

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

    from whet.trials.ledger import Ledger

MOST_CANDIDATES = 3
TRIAL, SEED = "trial", "seed"

# Student's t, 97.5 %: two-sided intervals of 95 % for 2 to 30 values.
_T: tuple[float, ...] = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045),
)
_NORMAL = 1.959964


def best_trials(trials: "Sequence[FrozenTrial]", *, is_higher_better: bool) -> "list[FrozenTrial]":
    """The trials that came to their end with the best values, no settings twice."""
    from optuna.trial import TrialState

    done = [t for t in trials if t.state == TrialState.COMPLETE and t.value is not None and math.isfinite(t.value)]
    done.sort(key=lambda t: (-(t.value or 0.0) if is_higher_better else (t.value or 0.0), t.number))
    found: list[FrozenTrial] = []
    for trial in done:
        if all(trial.params != other.params for other in found):
            found.append(trial)
    return found[:MOST_CANDIDATES]


def distributions() -> "dict[str, BaseDistribution]":
    """A trial of this study is a trial of the search and a seed."""
    from optuna.distributions import IntDistribution

    return {TRIAL: IntDistribution(0, 10**7), SEED: IntDistribution(0, 2**40)}


def put_in_line(ledger: "Ledger", candidates: "Sequence[FrozenTrial]", *, first_seed: int, seeds: int) -> int:
    """Asks for every candidate with every seed; how many there are in all."""
    for seed in range(first_seed + 1, first_seed + 1 + seeds):
        for trial in candidates:
            ledger.add({TRIAL: trial.number, SEED: seed}, task=f"trial {trial.number} with seed {seed}")
    return seeds * len(candidates)


def num_lost(trials: "Sequence[FrozenTrial]", number: int) -> int:
    """With how many seeds a candidate came to no value: it diverged, failed, or ran out of memory."""
    from optuna.trial import TrialState

    from whet.trials.ledger import does_count

    ended = (TrialState.PRUNED, TrialState.FAIL)
    return sum(t.state in ended and does_count(t) and t.params.get(TRIAL) == number for t in trials)


def values_by_seed(trials: "Sequence[FrozenTrial]", number: int) -> dict[str, float]:
    """What a candidate reached, seed by seed."""
    from optuna.trial import TrialState

    own: dict[str, Any] = {
        str(t.params[SEED]): t.value
        for t in trials
        if t.state == TrialState.COMPLETE and t.params.get(TRIAL) == number and t.value is not None
    }
    return dict(sorted(own.items(), key=lambda item: int(item[0])))


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Where the mean lies, 95 % sure; None for fewer than two values.

    >>> low, high = interval([0.8, 0.9])
    >>> round(low, 3), round(high, 3)
    (0.215, 1.485)
    """
    if len(values) < 2:
        return None
    half = _student(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def _student(freedom: int) -> float:
    if freedom <= len(_T):
        return _T[freedom - 1]
    # The first terms of Cornish and Fisher's expansion: within 0.0002 from 30 on.
    z = _NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
