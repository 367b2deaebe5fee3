"""The results of a search: the best trials confirmed with new seeds, importance and intervals."""

import datetime as dt
import math
import warnings
from collections.abc import Sequence
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from whet.hpo.search_config import SearchConfig
from whet.hpo.study import FAILURE, INFEASIBLE, MACHINE, RUN, SECONDS, STEPS, SearchStudy, counts, was_continued
from whet.run.search_result import SearchCandidate, SearchResult, SearchTrial, TrialState

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

    from whet.hpo.study import SearchStudy


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


def seed_distributions() -> "dict[str, BaseDistribution]":
    """A trial of this study is a trial of the search and a seed."""
    from optuna.distributions import IntDistribution

    return {TRIAL: IntDistribution(0, 10**7), SEED: IntDistribution(0, 2**40)}


def enqueue_seeds(ledger: "SearchStudy", candidates: "Sequence[FrozenTrial]", *, first_seed: int, seeds: int) -> int:
    """Asks for every candidate with every seed; how many there are in all."""
    for seed in range(first_seed + 1, first_seed + 1 + seeds):
        for trial in candidates:
            ledger.add({TRIAL: trial.number, SEED: seed}, task=f"trial {trial.number} with seed {seed}")
    return seeds * len(candidates)


def num_failed_seeds(trials: "Sequence[FrozenTrial]", number: int) -> int:
    """With how many seeds a candidate came to no value: it diverged, failed, or ran out of memory."""
    from optuna.trial import TrialState

    from whet.hpo.study import counts

    ended = (TrialState.PRUNED, TrialState.FAIL)
    return sum(t.state in ended and counts(t) and t.params.get(TRIAL) == number for t in trials)


def values_by_seed(trials: "Sequence[FrozenTrial]", number: int) -> dict[str, float]:
    """What a candidate reached, seed by seed."""
    from optuna.trial import TrialState

    own: dict[str, Any] = {
        str(t.params[SEED]): t.value
        for t in trials
        if t.state == TrialState.COMPLETE and t.params.get(TRIAL) == number and t.value is not None
    }
    return dict(sorted(own.items(), key=lambda item: int(item[0])))


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
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


def collect_results(
    question: SearchConfig, ledger: SearchStudy, confirming: SearchStudy, *, storage: str, seconds: float
) -> SearchResult:
    """The result as the storage has it now."""
    everything = ledger.trials()
    trials = [trial for trial in everything if counts(trial)]
    candidates = _candidates(question, trials, confirming.trials())
    gained = _difference(candidates)
    return SearchResult(
        name=question.name,
        recipe=question.recipe,
        goal=question.goal,
        is_higher_better=question.is_higher_better,
        space=question.space.words,
        fixed=question.fixed,
        subset=question.subset,
        seeds=question.seeds,
        sampler=question.sampler,
        pruner=question.pruner,
        storage=storage,
        resource=question.resource,
        trials=tuple(_row(trial) for trial in trials),
        continued=sum(was_continued(trial) for trial in everything),
        importance=_importance(ledger, trials),
        candidates=tuple(candidates),
        difference_low=None if gained is None else gained[0],
        difference_high=None if gained is None else gained[1],
        is_confirmed=bool(candidates) and all(len(c.values) + c.lost >= question.seeds for c in candidates),
        seconds=seconds,
        created=dt.date.today().isoformat(),
    )


def _row(trial: "FrozenTrial") -> SearchTrial:
    attributes = trial.user_attrs
    state = trial.state.name.lower()
    known: dict[str, TrialState] = {
        "complete": "complete",
        "pruned": "pruned",
        "fail": "failed",
        "running": "running",
    }
    last = max(trial.intermediate_values, default=None)
    value = trial.value if trial.value is not None else None if last is None else trial.intermediate_values[last]
    return SearchTrial(
        number=trial.number,
        state="infeasible" if INFEASIBLE in attributes else known.get(state, "waiting"),
        value=None if INFEASIBLE in attributes else value,
        # One that waits has them too, as what it is to be.
        settings=trial.params or trial.system_attrs.get("fixed_params", {}),
        steps=attributes.get(STEPS, 0),
        seconds=attributes.get(SECONDS, 0.0),
        run=attributes.get(RUN),
        machine=attributes.get(MACHINE),
        words=attributes.get(INFEASIBLE) or attributes.get(FAILURE) or "",
    )


def _candidates(
    question: SearchConfig, trials: "Sequence[FrozenTrial]", confirming: "Sequence[FrozenTrial]"
) -> list[SearchCandidate]:
    """The best first; by their seeds where all had the same number of them, else by the search's own value.

    One that came to no value with some seed is behind those that always did: the seeds it lived through say too much.
    """
    made = []
    for trial in best_trials(trials, is_higher_better=question.is_higher_better):
        values = values_by_seed(confirming, trial.number)
        around = mean_interval(list(values.values()))
        made.append(
            SearchCandidate(
                number=trial.number,
                settings=trial.params,
                values=values,
                lost=num_failed_seeds(confirming, trial.number),
                mean=mean(values.values()) if values else trial.value or 0.0,
                low=None if around is None else around[0],
                high=None if around is None else around[1],
            )
        )
    sign = -1 if question.is_higher_better else 1
    if len({len(c.values) + c.lost for c in made}) == 1:
        made.sort(key=lambda candidate: (candidate.lost, sign * candidate.mean))
    return made


def _difference(candidates: Sequence[SearchCandidate]) -> tuple[float, float] | None:
    """By how much the first is above the second on the same seeds."""
    if len(candidates) < 2:
        return None
    first, second = candidates[0].values, candidates[1].values
    return mean_interval([first[seed] - second[seed] for seed in first if seed in second])


def _importance(ledger: SearchStudy, trials: "Sequence[FrozenTrial]") -> dict[str, float]:
    """How much of the differences each setting explains, by Optuna; nothing where there are too few trials."""
    import optuna

    done = [trial for trial in trials if trial.state == optuna.trial.TrialState.COMPLETE]
    if len(done) < 2 or len({trial.value for trial in done}) < 2:
        return {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = optuna.importance.get_param_importances(ledger.study)
    except (ValueError, RuntimeError):
        return {}
    return {key: float(share) for key, share in found.items()}
