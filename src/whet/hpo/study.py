"""The trials of a search: claiming, continuing and finishing them so that any worker may be killed."""

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


BEAT_SECONDS = 10.0
_SILENCE_SECONDS = 60.0
"""A worker on another machine that has not been heard of for so long is taken to be gone."""
_UNOWNED_SECONDS = 15.0
"""A trial that was taken from the queue has its owner written on it at once, unless that process died."""


class TrialOwner(FrozenModel):
    """A process on a machine."""

    host: str
    pid: int
    started: float
    """When the process began: its number may be given to another one later."""

    @property
    def is_here(self) -> bool:
        return self.host == platform.node()

    def lives(self) -> bool:
        """Whether it is still there; only asked of this machine's."""
        try:
            process = psutil.Process(self.pid)
            return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - self.started) < 2.0
        except psutil.NoSuchProcess:
            return False


@cache
def _started(pid: int) -> float:
    return psutil.Process(pid).create_time()


def this_process() -> TrialOwner:
    return TrialOwner(host=platform.node(), pid=os.getpid(), started=_started(os.getpid()))


class SilenceDetector:
    """Remembers since when each trial has said nothing new, by our own clock: others' may be set differently."""

    def __init__(self) -> None:
        self._heard: dict[int, tuple[Any, float]] = {}

    def is_gone(self, number: int, attributes: dict[str, Any]) -> bool:
        """Whether nobody works on a running trial any longer."""
        try:
            owner = None if "owner" not in attributes else TrialOwner.from_json(attributes["owner"], where="the trial")
        except UsageError:
            owner = None
        if owner is not None and owner.is_here:
            return not owner.lives()
        said = (attributes.get("owner"), attributes.get("beat"))
        now = time.monotonic()
        before, since = self._heard.setdefault(number, (said, now))
        if before != said:
            self._heard[number] = (said, now)
            return False
        return now - since > (_UNOWNED_SECONDS if owner is None else _SILENCE_SECONDS)


OWNER, BEAT, RUN, TASK = "owner", "beat", "run", "task"
REPEATED = "another one does the same"
_CONTINUING = "goes on with"
DROPPED = "dropped"
"""Why a trial does not count: it goes on as another one, or there is one like it."""
FAILURE, INFEASIBLE, STEPS, SECONDS, MACHINE = "failure", "infeasible", "steps", "seconds", "machine"


def counts(trial: "FrozenTrial") -> bool:
    """Whether a trial is one of those that were asked for. A worker that was given up may have finished after all."""
    from optuna.trial import TrialState

    return trial.state != TrialState.FAIL or DROPPED not in trial.user_attrs


def was_continued(trial: "FrozenTrial") -> bool:
    """Whether it went on where another one was killed or stopped; one that waits has not yet."""
    from optuna.trial import TrialState

    is_copy = trial.user_attrs.get(DROPPED) == REPEATED
    task = str(trial.user_attrs.get(TASK, ""))
    return task.startswith(_CONTINUING) and trial.state != TrialState.WAITING and not is_copy


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimedTrial:
    """A trial that this process works on now."""

    trial: "Trial"
    number: int
    run: str | None
    """The run folder that it goes on with."""


class SearchStudy:
    """The trials of one study."""

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
        self._silence = SilenceDetector()
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
        """All of them, as they are now."""
        return sorted(self._storage.get_all_trials(self._id, deepcopy=True), key=lambda trial: trial.number)

    def take(self, *, most: int) -> ClaimedTrial | None:
        """A trial that waits, or a new one while there are fewer than `most`; None where there is nothing to do."""
        from optuna.trial import TrialState, create_trial

        self.reap()
        trials = self.trials()
        for waiting in trials:
            if waiting.state == TrialState.WAITING and self._claim(waiting.number):
                if not self._is_repeated(waiting, self.trials()):
                    return self._taken(waiting.number, run=waiting.user_attrs.get(RUN))
                self._drop(waiting.number, REPEATED)
        if sum(map(counts, trials)) >= most:
            return None
        # Owned from its first instant: there is no moment in which a kill would leave it to nobody.
        template = create_trial(state=TrialState.RUNNING, user_attrs={OWNER: this_process().as_json()})
        made = self._storage.create_new_trial(self._id, template_trial=template)
        number = self._storage.get_trial_number_from_id(made)
        if sum(counts(trial) for trial in self.trials() if trial.number < number) >= most:
            self._drop(number, "there are enough already")
            return None
        return self._taken(number, run=None)

    def add(self, parameters: Mapping[str, Any], *, task: str, run: str | None = None) -> None:
        """Puts a trial of these settings in line, unless one for the same task is there."""
        if any(trial.user_attrs.get(TASK) == task for trial in self.trials()):
            return
        about = {TASK: task, **({} if run is None else {RUN: run})}
        self.study.enqueue_trial(dict(parameters), user_attrs=about)

    def reap(self) -> int:
        """Marks trials whose process is gone, and puts them in line again; how many."""
        from optuna.trial import TrialState

        count = 0
        for trial in self.trials():
            is_gone = trial.state == TrialState.RUNNING and self._silence.is_gone(trial.number, trial.user_attrs)
            if is_gone and self.put_back(trial.number, "its process is gone"):
                count += 1
        trials = self.trials()
        tasks = {trial.user_attrs.get(TASK) for trial in trials}
        for trial in trials:
            # Whoever marked it may have died before it put it in line.
            should_go_on = trial.state == TrialState.FAIL and trial.user_attrs.get(DROPPED) in _GOES_ON
            if should_go_on and trial.params and _continuing(trial.number) not in tasks:
                self._go_on(trial)
        return count

    def put_back(self, number: int, reason: str) -> bool:
        """Gives a running trial up, to go on as another one; False if it has ended meanwhile."""
        assert reason in _GOES_ON
        if not self._drop(number, reason):
            return False
        trial = self._storage.get_trial(self._trial_id(number))
        if trial.params:
            self._go_on(trial)
        return True

    def note(self, number: int, name: str, value: Any) -> None:
        """Writes something on a running trial."""
        from optuna.exceptions import UpdateFinishedTrialError

        try:
            self._storage.set_trial_user_attr(self._trial_id(number), name, value)
        except UpdateFinishedTrialError:
            # It was given up, because nobody heard of us; who went on with it decides.
            return

    def finish(self, taken: ClaimedTrial, *, state: str, value: float | None = None, **about: Any) -> bool:
        """Ends a trial: "complete" with its value, "pruned", "infeasible" or "failed"; False if it was given up."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        for name, fact in about.items():
            self.note(taken.number, name, fact)
        ended = {"complete": TrialState.COMPLETE, "failed": TrialState.FAIL}.get(state, TrialState.PRUNED)
        if state == "infeasible":
            # Neither good nor bad: samplers keep away from it, and it never counts as a value.
            taken.trial.set_constraint("memory", 1.0)
        try:
            values = None if value is None or state != "complete" else [value]
            return self._storage.set_trial_state_values(self._trial_id(taken.number), state=ended, values=values)
        except UpdateFinishedTrialError:
            return False

    def _go_on(self, trial: "FrozenTrial") -> None:
        self.study.enqueue_trial(
            trial.params,
            user_attrs={TASK: _continuing(trial.number), **{k: v for k, v in trial.user_attrs.items() if k == RUN}},
        )

    def _claim(self, number: int) -> bool:
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        try:
            if not self._storage.set_trial_state_values(self._trial_id(number), state=TrialState.RUNNING):
                return False
        except UpdateFinishedTrialError:
            return False
        self.note(number, OWNER, this_process().as_json())
        return True

    def _drop(self, number: int, reason: str) -> bool:
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        self.note(number, DROPPED, reason)
        try:
            return self._storage.set_trial_state_values(self._trial_id(number), state=TrialState.FAIL)
        except UpdateFinishedTrialError:
            return False

    def _is_repeated(self, trial: "FrozenTrial", trials: "list[FrozenTrial]") -> bool:
        task = trial.user_attrs.get(TASK)
        earlier = (other for other in trials if other.number < trial.number and other.user_attrs.get(TASK) == task)
        # One that was dropped itself and goes on under another task is the same work too.
        return task is not None and any(True for _ in earlier)

    def _taken(self, number: int, *, run: str | None) -> ClaimedTrial:
        import optuna

        class Counted(optuna.Study):
            """Without trials that go on as others: no pruner may compare with them twice."""

            def get_trials(self, deepcopy: bool = True, states: "Container[TrialState] | None" = None) -> Any:
                return [trial for trial in super().get_trials(deepcopy, states) if counts(trial)]

        # Its own study object: a sampler belongs to one trial and one thread.
        sampler = self._sampler(self._draw(number))
        study = Counted(study_name=self._name, storage=self._storage, sampler=sampler, pruner=self._pruner)
        trial = optuna.Trial(study, self._trial_id(number))
        for key, distribution in self._distributions.items():
            _suggest(trial, key, distribution)
        return ClaimedTrial(trial=trial, number=number, run=run)

    def _draw(self, number: int) -> int:
        """How many trials were drawn before it, or before the one that it goes on with: stops change no draw."""
        trials = self.trials()
        while (task := str(trials[number].user_attrs.get(TASK, ""))).startswith(_CONTINUING):
            number = int(task.removeprefix(_CONTINUING))
        return sum(not str(t.user_attrs.get(TASK, "")).startswith(_CONTINUING) for t in trials[:number])

    def _trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._id, number)


_GOES_ON = ("its process is gone", "stopped")


def _continuing(number: int) -> str:
    return f"{_CONTINUING} {number}"


def _suggest(trial: "Trial", key: str, distribution: "BaseDistribution") -> None:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    match distribution:
        case CategoricalDistribution(choices=choices):
            trial.suggest_categorical(key, choices)
        case IntDistribution(low=low, high=high, log=log, step=step):
            trial.suggest_int(key, low, high, log=log, step=step)
        case FloatDistribution(low=low, high=high, log=log, step=step):
            trial.suggest_float(key, low, high, log=log, step=step)
