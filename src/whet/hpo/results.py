"""The results of a search: trials, candidates confirmed with new seeds, importances and confidence intervals.

The best few trials, the candidates, are retrained with seeds that the search has not used, so that a lucky seed does
not decide the winner.
"""

import datetime as dt
import math
import warnings
from collections.abc import Sequence
from statistics import mean
from typing import TYPE_CHECKING

from whet.base.statistics import mean_interval
from whet.hpo.search_config import SearchConfig
from whet.hpo.study import (
    FAILURE,
    INFEASIBLE,
    MACHINE,
    PEAK_BYTES,
    RUN,
    SECONDS,
    STEPS,
    SearchStudy,
    counts,
    was_continued,
)
from whet.run.search_result import SearchCandidate, SearchResult, SearchTrial
from whet.run.search_result import TrialState as SearchTrialState

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

# Maximum number of trials that are retrained with new seeds.
MAX_CANDIDATES = 3
TRIAL_KEY, SEED_KEY = "trial", "seed"


# --- Confirmation with new seeds -------------------------------------------------------------------------------------


def best_trials(trials: "Sequence[FrozenTrial]", *, is_higher_better: bool) -> "list[FrozenTrial]":
    """Return the completed trials with the best values, without duplicate settings."""
    from optuna.trial import TrialState

    done = [t for t in trials if t.state == TrialState.COMPLETE and t.value is not None and math.isfinite(t.value)]
    done.sort(key=lambda t: (-(t.value or 0.0) if is_higher_better else (t.value or 0.0), t.number))
    best: list[FrozenTrial] = []
    for trial in done:
        if all(trial.params != other.params for other in best):
            best.append(trial)
    return best[:MAX_CANDIDATES]


def seed_distributions() -> "dict[str, BaseDistribution]":
    """Return the search space of the confirmation study: a trial number and a seed."""
    from optuna.distributions import IntDistribution

    return {TRIAL_KEY: IntDistribution(0, 10**7), SEED_KEY: IntDistribution(0, 2**40)}


def enqueue_seeds(study: SearchStudy, candidates: "Sequence[FrozenTrial]", *, first_seed: int, seeds: int) -> int:
    """Enqueue every candidate with every seed; return the number of pairs."""
    for seed in range(first_seed + 1, first_seed + 1 + seeds):
        for trial in candidates:
            study.add({TRIAL_KEY: trial.number, SEED_KEY: seed}, task=f"trial {trial.number} with seed {seed}")
    return seeds * len(candidates)


def num_failed_seeds(trials: "Sequence[FrozenTrial]", number: int) -> int:
    """Return the number of seeds with which a candidate diverged, failed or ran out of memory."""
    from optuna.trial import TrialState

    ended = (TrialState.PRUNED, TrialState.FAIL)
    return sum(t.state in ended and counts(t) and t.params.get(TRIAL_KEY) == number for t in trials)


def values_by_seed(trials: "Sequence[FrozenTrial]", number: int) -> dict[str, float]:
    """Return the value of each completed seed of a candidate, ordered by seed."""
    from optuna.trial import TrialState

    values = {
        int(t.params[SEED_KEY]): t.value
        for t in trials
        if t.state == TrialState.COMPLETE and t.params.get(TRIAL_KEY) == number and t.value is not None
    }
    return {str(seed): values[seed] for seed in sorted(values)}


# --- the result ------------------------------------------------------------------------------------------------------


def collect_results(
    config: SearchConfig, study: SearchStudy, confirming: SearchStudy, *, storage: str, seconds: float
) -> SearchResult:
    """Build the result of a search from the current state of its storage."""
    everything = study.trials()
    trials = [trial for trial in everything if counts(trial)]
    candidates = _candidates(config, trials, confirming.trials())
    difference = _difference(candidates)
    return SearchResult(
        name=config.name,
        recipe=config.recipe,
        goal=config.goal,
        is_higher_better=config.is_higher_better,
        space=config.space.arguments,
        fixed=config.fixed,
        subset=config.subset,
        seeds=config.seeds,
        sampler=config.sampler,
        pruner=config.pruner,
        storage=storage,
        resource=config.resource,
        trials=tuple(_row(trial) for trial in trials),
        continued=sum(was_continued(trial) for trial in everything),
        importance=_importance(study, trials),
        candidates=tuple(candidates),
        difference_low=None if difference is None else difference[0],
        difference_high=None if difference is None else difference[1],
        is_confirmed=bool(candidates) and all(len(c.values) + c.lost >= config.seeds for c in candidates),
        seconds=seconds,
        created=dt.date.today().isoformat(),
    )


def _row(trial: "FrozenTrial") -> SearchTrial:
    attributes = trial.user_attrs
    states: dict[str, SearchTrialState] = {
        "complete": "complete",
        "pruned": "pruned",
        "fail": "failed",
        "running": "running",
    }
    is_infeasible = INFEASIBLE in attributes
    # A trial that did not complete has no final value. Use its last evaluation.
    last = max(trial.intermediate_values, default=None)
    value = trial.value if trial.value is not None else None if last is None else trial.intermediate_values[last]
    return SearchTrial(
        number=trial.number,
        state="infeasible" if is_infeasible else states.get(trial.state.name.lower(), "waiting"),
        value=None if is_infeasible else value,
        # Optuna stores the settings of a waiting trial in its system attributes only.
        settings=trial.params or trial.system_attrs.get("fixed_params", {}),
        steps=attributes.get(STEPS, 0),
        seconds=attributes.get(SECONDS, 0.0),
        peak_bytes=attributes.get(PEAK_BYTES),
        run=attributes.get(RUN),
        machine=attributes.get(MACHINE),
        note=attributes.get(INFEASIBLE) or attributes.get(FAILURE) or "",
    )


def _candidates(
    config: SearchConfig, trials: "Sequence[FrozenTrial]", confirming: "Sequence[FrozenTrial]"
) -> list[SearchCandidate]:
    """Return the candidates, best first.

    Candidates are ranked by their mean over the new seeds once all of them have finished the same number of seeds, and
    by their value in the search until then. A candidate that failed with any seed ranks behind those without failures,
    because its remaining seeds are a biased sample.
    """
    candidates = []
    for trial in best_trials(trials, is_higher_better=config.is_higher_better):
        values = values_by_seed(confirming, trial.number)
        interval = mean_interval(list(values.values()))
        candidates.append(
            SearchCandidate(
                number=trial.number,
                settings=trial.params,
                values=values,
                lost=num_failed_seeds(confirming, trial.number),
                mean=mean(values.values()) if values else trial.value or 0.0,
                low=None if interval is None else interval[0],
                high=None if interval is None else interval[1],
            )
        )
    # The sort is ascending, so negate a metric that is better when higher.
    sign = -1 if config.is_higher_better else 1
    if len({len(c.values) + c.lost for c in candidates}) == 1:
        candidates.sort(key=lambda candidate: (candidate.lost, sign * candidate.mean))
    return candidates


def _difference(candidates: Sequence[SearchCandidate]) -> tuple[float, float] | None:
    """Return the confidence interval of the difference between the two best candidates, paired by seed, or None."""
    if len(candidates) < 2:
        return None
    first, second = candidates[0].values, candidates[1].values
    return mean_interval([first[seed] - second[seed] for seed in first if seed in second])


def _importance(study: SearchStudy, trials: "Sequence[FrozenTrial]") -> dict[str, float]:
    """Return the importance of each setting as estimated by Optuna, or an empty dict if it cannot be estimated."""
    import optuna

    done = [trial for trial in trials if trial.state == optuna.trial.TrialState.COMPLETE]
    if len(done) < 2 or len({trial.value for trial in done}) < 2:
        return {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importance = optuna.importance.get_param_importances(study.study)
    except (ValueError, RuntimeError):
        return {}
    return {key: float(share) for key, share in importance.items()}
