"""Claim, continue and finish the trials of a search. Any worker may be killed at any time.

All state is in the storage. A trial whose process has died is marked as failed, which only one process can do, and is
enqueued as a new trial with the same settings and the same run folder. If two processes enqueue it, because the first
one died in between, the later copy is dropped.
"""

import os
import platform
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import psutil

from whet.base.errors import UsageError
from whet.base.model import FrozenModel

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial, Trial, TrialState

# Names of user attributes of a trial.
OWNER, HEARTBEAT, RUN, TASK = "owner", "heartbeat", "run", "task"
FAILURE, INFEASIBLE, STEPS, SECONDS, MACHINE = "failure", "infeasible", "steps", "seconds", "machine"
PEAK_BYTES = "peak_bytes"
# Set on a trial that does not count. The value is the reason, such as one of the following.
DROPPED = "dropped"

DUPLICATE = "another trial does the same"
OWNER_DIED, STOPPED = "its process has died", "stopped"
# A trial dropped for one of these reasons is continued by another trial.
_CONTINUED = (OWNER_DIED, STOPPED)
# The task of a trial that continues another trial, for example "continues 7".
_CONTINUES = "continues"

HEARTBEAT_SECONDS = 10.0
# A worker on another machine is considered dead after this many seconds without a heartbeat.
_SILENCE_SECONDS = 60.0
# A worker sets the owner right after it claims a trial. If the owner is missing for this long, the worker has died.
_UNOWNED_SECONDS = 15.0


class TrialOwner(FrozenModel):
    """The process that works on a trial."""

    host: str
    pid: int
    started: float
    """Start time of the process in unix seconds, because the system reuses process ids."""

    @property
    def is_local(self) -> bool:
        return self.host == platform.node()

    def is_alive(self) -> bool:
        """Return whether the process is still running. The owner must be on this machine."""
        try:
            process = psutil.Process(self.pid)
            return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - self.started) < 2.0
        except psutil.NoSuchProcess:
            return False


@cache
def _start_time(pid: int) -> float:
    return psutil.Process(pid).create_time()


def this_process() -> TrialOwner:
    return TrialOwner(host=platform.node(), pid=os.getpid(), started=_start_time(os.getpid()))


class DeadOwnerDetector:
    """Detects running trials whose owner has died.

    An owner on this machine is looked up in the process table. An owner on another machine is considered dead if its
    heartbeat stops. The age of a heartbeat is measured with the local clock, because other clocks may be wrong.
    """

    def __init__(self) -> None:
        self._last_seen: dict[int, tuple[Any, float]] = {}

    def is_dead(self, number: int, attributes: dict[str, Any]) -> bool:
        """Return whether the process that owns a running trial has died."""
        try:
            # Treat an owner that cannot be parsed as missing.
            owner = None if OWNER not in attributes else TrialOwner.from_json(attributes[OWNER], where="the trial")
        except UsageError:
            owner = None
        if owner is not None and owner.is_local:
            return not owner.is_alive()
        signs = (attributes.get(OWNER), attributes.get(HEARTBEAT))
        now = time.monotonic()
        before, since = self._last_seen.setdefault(number, (signs, now))
        # Any change shows that the owner is alive, so restart the local timer.
        if before != signs:
            self._last_seen[number] = (signs, now)
            return False
        return now - since > (_UNOWNED_SECONDS if owner is None else _SILENCE_SECONDS)


def counts(trial: "FrozenTrial") -> bool:
    """Return whether a trial counts toward the requested number. A dropped trial counts only if it still finished."""
    from optuna.trial import TrialState

    return trial.state != TrialState.FAIL or DROPPED not in trial.user_attrs


def was_continued(trial: "FrozenTrial") -> bool:
    """Return whether a trial has resumed a killed or stopped trial. A waiting trial has not resumed it yet."""
    from optuna.trial import TrialState

    is_copy = trial.user_attrs.get(DROPPED) == DUPLICATE
    return _continued_number(trial) is not None and trial.state != TrialState.WAITING and not is_copy


def _continued_number(trial: "FrozenTrial") -> int | None:
    """Return the number of the trial that this one continues, or None."""
    word, _, number = str(trial.user_attrs.get(TASK, "")).partition(" ")
    return int(number) if word == _CONTINUES else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimedTrial:
    """A trial that this process has claimed."""

    trial: "Trial"
    number: int
    run: str | None
    """The run folder that the trial continues, or None for a new run."""


class SearchStudy:
    """The trials of one Optuna study."""

    def __init__(
        self,
        storage: "BaseStorage",
        name: str,
        *,
        is_higher_better: bool,
        distributions: "Mapping[str, BaseDistribution]",
        sampler: "Callable[[int], BaseSampler]",
        pruner: "BasePruner",
    ) -> None:
        import optuna

        self._storage = storage
        self._name = name
        self._distributions = dict(distributions)
        self._sampler = sampler
        self._pruner = pruner
        self._dead_owners = DeadOwnerDetector()
        direction: Literal["maximize", "minimize"] = "maximize" if is_higher_better else "minimize"
        self.study = optuna.create_study(
            storage=storage,
            study_name=name,
            direction=direction,
            load_if_exists=True,
            pruner=pruner,
            sampler=sampler(0),
        )
        self._id = storage.get_study_id_from_name(name)

    def trials(self) -> "list[FrozenTrial]":
        """Return all trials in their current state."""
        return sorted(self._storage.get_all_trials(self._id, deepcopy=True), key=lambda trial: trial.number)

    def claim(self, *, max_trials: int) -> ClaimedTrial | None:
        """Claim a waiting trial, or create one if fewer than `max_trials` count. Return None if no trial is left."""
        from optuna.trial import TrialState, create_trial

        self.recover()
        trials = self.trials()
        for waiting in trials:
            if waiting.state == TrialState.WAITING and self._claim_waiting(waiting.number):
                if not self._is_duplicate(waiting, self.trials()):
                    return self._claimed(waiting.number, run=waiting.user_attrs.get(RUN))
                self._drop(waiting.number, DUPLICATE)
        if sum(map(counts, trials)) >= max_trials:
            return None
        # Create the trial together with its owner, so that a kill cannot leave a running trial without an owner.
        template = create_trial(state=TrialState.RUNNING, user_attrs={OWNER: this_process().as_json()})
        created = self._storage.create_new_trial(self._id, template_trial=template)
        number = self._storage.get_trial_number_from_id(created)
        if sum(counts(trial) for trial in self.trials() if trial.number < number) >= max_trials:
            # Other workers have created the last trials in the meantime, so this one does not count.
            self._drop(number, "there are enough already")
            return None
        return self._claimed(number, run=None)

    def add(self, parameters: Mapping[str, Any], *, task: str, run: str | None = None) -> None:
        """Enqueue a trial with these settings, unless a trial with the same task exists."""
        if any(trial.user_attrs.get(TASK) == task for trial in self.trials()):
            return
        attributes = {TASK: task, **({} if run is None else {RUN: run})}
        self.study.enqueue_trial(dict(parameters), user_attrs=attributes)

    def recover(self) -> int:
        """Give up trials whose process has died and enqueue their continuations. Return the number of such trials."""
        from optuna.trial import TrialState

        num_recovered = 0
        for trial in self.trials():
            is_dead = trial.state == TrialState.RUNNING and self._dead_owners.is_dead(trial.number, trial.user_attrs)
            if is_dead and self.give_up(trial.number, OWNER_DIED):
                num_recovered += 1
        trials = self.trials()
        continued = {_continued_number(trial) for trial in trials}
        for trial in trials:
            # The process that marked the trial may have died before it enqueued the continuation.
            is_continued = trial.state == TrialState.FAIL and trial.user_attrs.get(DROPPED) in _CONTINUED
            if is_continued and trial.params and trial.number not in continued:
                self._enqueue_continuation(trial)
        return num_recovered

    def give_up(self, number: int, reason: str) -> bool:
        """Give up a running trial and enqueue its continuation. Return False if it has ended in the meantime."""
        assert reason in _CONTINUED
        if not self._drop(number, reason):
            return False
        trial = self._storage.get_trial(self._trial_id(number))
        if trial.params:
            self._enqueue_continuation(trial)
        return True

    def set_attribute(self, number: int, name: str, value: Any) -> None:
        """Set a user attribute of a running trial."""
        from optuna.exceptions import UpdateFinishedTrialError

        try:
            self._storage.set_trial_user_attr(self._trial_id(number), name, value)
        except UpdateFinishedTrialError:
            # Another process gave up the trial because its heartbeat was late. Its continuation sets the attributes.
            return

    def finish(self, claimed: ClaimedTrial, *, state: str, value: float | None = None, **attributes: Any) -> bool:
        """Finish a trial as "complete", "pruned", "infeasible" or "failed". Return False if it was given up."""
        from optuna.trial import TrialState

        for name, fact in attributes.items():
            self.set_attribute(claimed.number, name, fact)
        ended = {"complete": TrialState.COMPLETE, "failed": TrialState.FAIL}.get(state, TrialState.PRUNED)
        if state == "infeasible":
            # Report a violated constraint: samplers then avoid such settings without treating them as bad values.
            claimed.trial.set_constraint("memory", 1.0)
        return self._set_state(claimed.number, ended, value if state == "complete" else None)

    def _enqueue_continuation(self, trial: "FrozenTrial") -> None:
        attributes = {TASK: f"{_CONTINUES} {trial.number}"}
        if RUN in trial.user_attrs:
            attributes[RUN] = trial.user_attrs[RUN]
        self.study.enqueue_trial(trial.params, user_attrs=attributes)

    def _claim_waiting(self, number: int) -> bool:
        from optuna.trial import TrialState

        if not self._set_state(number, TrialState.RUNNING):
            return False
        self.set_attribute(number, OWNER, this_process().as_json())
        return True

    def _drop(self, number: int, reason: str) -> bool:
        from optuna.trial import TrialState

        self.set_attribute(number, DROPPED, reason)
        return self._set_state(number, TrialState.FAIL)

    def _set_state(self, number: int, state: "TrialState", value: float | None = None) -> bool:
        """Set the state of a trial. Return False if another process was faster or the trial has ended."""
        from optuna.exceptions import UpdateFinishedTrialError

        values = None if value is None else [value]
        try:
            return self._storage.set_trial_state_values(self._trial_id(number), state=state, values=values)
        except UpdateFinishedTrialError:
            return False

    def _is_duplicate(self, trial: "FrozenTrial", trials: "list[FrozenTrial]") -> bool:
        # Include earlier trials that were dropped themselves: their continuations have another task.
        task = trial.user_attrs.get(TASK)
        return task is not None and any(
            other.number < trial.number and other.user_attrs.get(TASK) == task for other in trials
        )

    def _claimed(self, number: int, *, run: str | None) -> ClaimedTrial:
        import optuna

        class CountedStudy(optuna.Study):
            """A study without dropped trials, so that pruners do not count a continued trial twice."""

            def get_trials(self, deepcopy: bool = True, states: "Container[TrialState] | None" = None) -> Any:
                return [trial for trial in super().get_trials(deepcopy, states) if counts(trial)]

        # Create a new study object, because each trial has its own sampler, which only one thread may use.
        sampler = self._sampler(self._draw_number(number))
        study = CountedStudy(study_name=self._name, storage=self._storage, sampler=sampler, pruner=self._pruner)
        trial = optuna.Trial(study, self._trial_id(number))
        for key, distribution in self._distributions.items():
            _suggest(trial, key, distribution)
        return ClaimedTrial(trial=trial, number=number, run=run)

    def _draw_number(self, number: int) -> int:
        """Return the number of trials that were drawn before this one.

        Continuations are not counted, and a continuation has the number of the trial that it continues, so that
        interruptions do not change what a sampler draws.
        """
        trials = self.trials()
        while (continued := _continued_number(trials[number])) is not None:
            number = continued
        return sum(_continued_number(trial) is None for trial in trials[:number])

    def _trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._id, number)


def _suggest(trial: "Trial", key: str, distribution: "BaseDistribution") -> None:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    match distribution:
        case CategoricalDistribution(choices=choices):
            trial.suggest_categorical(key, choices)
        case IntDistribution(low=low, high=high, log=log, step=step):
            trial.suggest_int(key, low, high, log=log, step=step)
        case FloatDistribution(low=low, high=high, log=log, step=step):
            trial.suggest_float(key, low, high, log=log, step=step)
