"""Workers that claim trials and train them until the search has enough."""

import math
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from whet.base.errors import UsageError, WhetError
from whet.base.units import format_bytes
from whet.hpo.study import (
    BEAT,
    BEAT_SECONDS,
    FAILURE,
    INFEASIBLE,
    MACHINE,
    RUN,
    SECONDS,
    STEPS,
    ClaimedTrial,
    SearchStudy,
)
from whet.hpo.trial_process import DIVERGED, OUT_OF_MEMORY, TrialExit, run_trial_process
from whet.run import lock
from whet.run.events import History
from whet.run.folder import RUN_FILE, open_run
from whet.training.supervisor import prepare_restart

Say = Callable[[str], None]


def devices_for(device: str, *, jobs: int, say: Say) -> list[str]:
    """On which device each worker's trials run: as many at once as the machine has devices, or CPUs for."""
    if jobs <= 1:
        return [device]
    from whet.machine.probe import probe_machine

    cards = [] if device == "cpu" else list(probe_machine().accelerators)
    if not cards:
        return [device] * jobs
    if device != "auto" and device != cards[0].kind:
        say(f"--device {device}: one device, so trials run one after the other")
        return [device]
    if cards[0].kind == "cuda" and len(cards) > 1:
        return [f"cuda:{number}" for number in range(min(jobs, len(cards)))]
    say(f"--jobs {jobs}: there is one {cards[0].name or cards[0].kind}, so trials run one after the other")
    return [device]


def run_together(each: list[Callable[[], None]], *, stop: threading.Event) -> None:
    """Side by side in threads, which only wait for processes; where one fails, the others stop and save."""
    with ThreadPoolExecutor(max_workers=len(each), thread_name_prefix="worker") as pool:
        futures: list[Future[None]] = [pool.submit(one) for one in each]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        if any(future.exception() for future in done):
            stop.set()
    for future in futures:
        future.result()


def machine_name() -> str:
    """This machine, for who reads where a trial was infeasible."""
    return f"{platform.node()} ({format_bytes(psutil.virtual_memory().total)})"


_WAIT_SECONDS = 0.5
_MOST_KILLS = 3
_MOST_FAILURES = 3
"""So many failures in a row, and no success: the search stops and says why."""

TrialKind = Literal["trial", "seed"]
EndState = Literal["complete", "pruned", "infeasible", "failed", "stopped", "given up"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialTask:
    """What a trial's process is told."""

    arguments: dict[str, Any]
    run: Path
    """Where the run is, or will be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedTrial:
    """A trial that ended, for who shows it."""

    number: int
    part: TrialKind
    """One of the search, or one of its best with another seed."""
    parameters: Mapping[str, Any]
    state: EndState
    value: float | None
    words: str
    steps: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """What a worker needs to know."""

    target: str
    """The function that trains a trial, as module:function."""
    goal: str
    machine: str
    prepare: Callable[[ClaimedTrial], TrialTask]
    """From a trial's settings to what its process is told."""
    should_stop: Callable[[], bool]
    told: Callable[[FinishedTrial], None]
    part: TrialKind = "trial"
    """Only trials are ended early: a winner is judged by whole trainings."""


def run_worker(ledger: SearchStudy, task: WorkerConfig, *, most: int) -> None:
    """Until `most` trials have ended and none waits, or it should stop."""
    from optuna.trial import TrialState

    failures: list[str] = []
    while not task.should_stop():
        taken = ledger.take(most=most)
        if taken is None:
            if not any(t.state in (TrialState.RUNNING, TrialState.WAITING) for t in ledger.trials()):
                return
            time.sleep(_WAIT_SECONDS)
            continue
        ended = _complete_trial(ledger, task, taken)
        task.told(ended)
        failures = [*failures, ended.words] if ended.state == "failed" else []
        if len(failures) >= _MOST_FAILURES:
            raise WhetError(
                f"{_MOST_FAILURES} trials in a row failed", got=failures[-1], try_="whet train with the same settings"
            )


def _complete_trial(ledger: SearchStudy, work: WorkerConfig, taken: ClaimedTrial) -> FinishedTrial:
    began = time.monotonic()
    parameters = dict(taken.trial.params)
    value: float | None = None
    steps = 0
    state: EndState
    try:
        task = work.prepare(taken)
        run = task.run
        ledger.note(taken.number, RUN, str(run))
        state, words = _train_until_done(ledger, work, taken, task)
        value, steps = _reached(run, goal=work.goal)
    except UsageError as error:
        # Values that are fine one by one need not be so together.
        state, words = "infeasible", f"{error.what}: {error.got}"
    except WhetError as error:
        # A run folder that is damaged, say: one trial, and not the search.
        state, words = "failed", f"{error.what}: {error.got}"
    seconds = time.monotonic() - began
    if state == "complete" and (value is None or not math.isfinite(value)):
        state, words = "failed", f"{work.goal} is {value}"
    if state == "stopped":
        state = "stopped" if ledger.put_back(taken.number, "stopped") else "given up"
    else:
        about = {STEPS: steps, SECONDS: seconds, MACHINE: work.machine}
        if words:
            about[INFEASIBLE if state == "infeasible" else FAILURE] = words
        state = state if ledger.finish(taken, state=state, value=value, **about) else "given up"
    return FinishedTrial(
        number=taken.number,
        part=work.part,
        parameters=parameters,
        state=state,
        value=value,
        words=words,
        steps=steps,
        seconds=seconds,
    )


def _train_until_done(
    ledger: SearchStudy, work: WorkerConfig, taken: ClaimedTrial, task: TrialTask
) -> tuple[EndState, str]:
    """Trains it, again after kills, until it is clear what became of it."""
    beats = _Heartbeats(ledger, taken.number)

    _await_lock(task.run)
    reported = dict(_evaluations(task.run, goal=work.goal))
    was_last_of_all = False
    for number, value in reported.items():
        # A trial that goes on has the history that its run's events tell, and a pruner saw it step by step.
        taken.trial.report(value, number)
        was_last_of_all = work.part == "trial" and taken.trial.should_prune()
    if was_last_of_all and not _is_done(task.run):
        # Its worker died after it was told so.
        return "pruned", ""

    def judge(number: int, value: float, is_last: bool) -> bool:
        if number not in reported:
            taken.trial.report(value, number)
            reported[number] = value
        return is_last or not (work.part == "trial" and taken.trial.should_prune())

    for kills in range(_MOST_KILLS + 1):
        life = run_trial_process(
            work.target,
            task.arguments,
            log=task.run.with_suffix(".log"),
            judge=judge,
            should_stop=work.should_stop,
            beat=beats,
        )
        if life.code >= 0:
            return _end_state(life)
        if life.was_stopped:
            return "stopped", life.killer
        if kills < _MOST_KILLS and (task.run / RUN_FILE).exists():
            _await_lock(task.run)
            # The first kill goes on as it was, the next with half the micro-batch: mostly memory is the reason.
            prepare_restart(task.run, killer=life.killer, is_first=kills == 0)
    state: EndState = "infeasible" if life.killer == "SIGKILL" else "failed"
    return state, f"killed {_MOST_KILLS + 1} times, by {life.killer} at last"


def _end_state(life: TrialExit) -> tuple[EndState, str]:
    if life.was_pruned:
        return "pruned", ""
    if life.was_stopped and life.code != 0:
        return "stopped", ""
    if life.code == OUT_OF_MEMORY:
        return "infeasible", f"out of memory: {life.failure}"
    if life.code == DIVERGED:
        # That is no fault of the machine or the recipe: it is what a trial is for.
        return "pruned", f"diverged: {life.failure}"
    if life.code == 0:
        return "complete", ""
    return "failed", life.failure or f"exit code {life.code}"


def _evaluations(run: Path, *, goal: str) -> Iterator[tuple[int, float]]:
    """Number and value of each evaluation that a run's events tell of."""
    if not (run / RUN_FILE).exists():
        return
    every = open_run(run).config.get("eval_every")
    for event in History(run).events(kinds=("eval",)):
        value = event.number(goal)
        if value is not None and isinstance(every, int):
            yield math.ceil(event.step / every), value


def _is_done(run: Path) -> bool:
    end = History(run).last("end")
    return end is not None and end.get("state") == "done"


def _reached(run: Path, *, goal: str) -> tuple[float | None, int]:
    """The last value of the goal, and the steps that were made."""
    if not (run / RUN_FILE).exists():
        return None, 0
    history = History(run)
    values = (event.number(goal) for event in history.backwards(kinds=("eval",)))
    last = history.last("step", "end")
    return next((value for value in values if value is not None), None), 0 if last is None else last.step


def _await_lock(run: Path, *, seconds: float = 60.0) -> None:
    """The process of a worker that was killed may need a moment to end."""
    deadline = time.monotonic() + seconds
    while (run / RUN_FILE).exists() and lock.is_locked(run) and time.monotonic() < deadline:
        time.sleep(0.1)


class _Heartbeats:
    """Says every few seconds that somebody works on a trial."""

    def __init__(self, ledger: SearchStudy, number: int) -> None:
        self._ledger = ledger
        self._number = number
        self._count = 0
        self._at = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._at >= BEAT_SECONDS:
            self._at = time.monotonic()
            self._count += 1
            self._ledger.note(self._number, BEAT, self._count)
