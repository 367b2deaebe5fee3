"""What was found, as a record: the trials, what mattered, and the winner with its interval."""

import datetime as dt
import warnings
from collections.abc import Sequence
from statistics import mean
from typing import TYPE_CHECKING

from whet.run.search_result import Candidate, SearchResult, SearchTrial
from whet.run.search_result import TrialState as State
from whet.trials.ledger import FAILURE, INFEASIBLE, MACHINE, RUN, SECONDS, STEPS, Ledger, does_count, has_gone_on
from whet.trials.question import Question
from whet.trials.seeds import best_trials, interval, num_lost, values_by_seed

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial


def outcome(question: Question, ledger: Ledger, confirming: Ledger, *, storage: str, seconds: float) -> SearchResult:
    """The result as the storage has it now."""
    everything = ledger.trials()
    trials = [trial for trial in everything if does_count(trial)]
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
        continued=sum(has_gone_on(trial) for trial in everything),
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
    known: dict[str, State] = {"complete": "complete", "pruned": "pruned", "fail": "failed", "running": "running"}
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
    question: Question, trials: "Sequence[FrozenTrial]", confirming: "Sequence[FrozenTrial]"
) -> list[Candidate]:
    """The best first; by their seeds where all had the same number of them, else by the search's own value.

    One that came to no value with some seed is behind those that always did: the seeds it lived through say too much.
    """
    made = []
    for trial in best_trials(trials, is_higher_better=question.is_higher_better):
        values = values_by_seed(confirming, trial.number)
        around = interval(list(values.values()))
        made.append(
            Candidate(
                number=trial.number,
                settings=trial.params,
                values=values,
                lost=num_lost(confirming, trial.number),
                mean=mean(values.values()) if values else trial.value or 0.0,
                low=None if around is None else around[0],
                high=None if around is None else around[1],
            )
        )
    sign = -1 if question.is_higher_better else 1
    if len({len(c.values) + c.lost for c in made}) == 1:
        made.sort(key=lambda candidate: (candidate.lost, sign * candidate.mean))
    return made


def _difference(candidates: Sequence[Candidate]) -> tuple[float, float] | None:
    """By how much the first is above the second on the same seeds."""
    if len(candidates) < 2:
        return None
    first, second = candidates[0].values, candidates[1].values
    return interval([first[seed] - second[seed] for seed in first if seed in second])


def _importance(ledger: Ledger, trials: "Sequence[FrozenTrial]") -> dict[str, float]:
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
