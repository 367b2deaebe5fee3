"""Workers that claim trials and train them until the search has enough trials."""

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
    FAILURE,
    HEARTBEAT,
    HEARTBEAT_SECONDS,
    INFEASIBLE,
    MACHINE,
    PEAK_BYTES,
    RUN,
    SECONDS,
    STEPS,
    STOPPED,
    ClaimedTrial,
    SearchStudy,
)
from whet.hpo.trial_process import DIVERGED, OUT_OF_MEMORY, TrialExit, run_trial_process
from whet.run import lock
from whet.run.events import History
from whet.run.folder import RUN_FILE, open_run
from whet.training.supervisor import prepare_restart

# Seconds between two attempts to claim a trial while other workers train.
_WAIT_SECONDS = 0.5
# A trial whose process is killed more often than this is not restarted.
_MAX_KILLS = 3
# After this many consecutive failures the search stops with an error.
_MAX_FAILURES = 3

TrialKind = Literal["trial", "seed"]
EndState = Literal["complete", "pruned", "infeasible", "failed", "stopped", "given up"]
Log = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialTask:
    """The arguments for training one trial in its process."""

    arguments: dict[str, Any]
    run: Path
    """The run folder. It may not exist yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedTrial:
    """The result of a trial that has ended, for progress messages."""

    number: int
    part: TrialKind
    """Whether this is a trial of the search, or one of the best trials with another seed."""
    parameters: Mapping[str, Any]
    state: EndState
    value: float | None
    message: str
    steps: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """The training function of a worker, and its callbacks."""

    target: str
    """The function that trains a trial, as "module:function"."""
    goal: str
    machine: str
    prepare: Callable[[ClaimedTrial], TrialTask]
    """Returns the task of a claimed trial."""
    should_stop: Callable[[], bool]
    on_finished: Callable[[FinishedTrial], None]
    part: TrialKind = "trial"
    """The kind of trial that the worker claims. Seeds are never pruned, because only complete runs are comparable."""


def run_worker(study: SearchStudy, config: WorkerConfig, *, max_trials: int) -> None:
    """Train trials until `max_trials` have ended and none is waiting, or until `should_stop` returns True."""
    from optuna.trial import TrialState

    failures: list[str] = []
    while not config.should_stop():
        claimed = study.claim(max_trials=max_trials)
        if claimed is None:
            # Wait while other workers train. If one of them dies, this worker continues its trial.
            if not any(t.state in (TrialState.RUNNING, TrialState.WAITING) for t in study.trials()):
                return
            time.sleep(_WAIT_SECONDS)
            continue
        finished = _complete_trial(study, config, claimed)
        config.on_finished(finished)
        failures = [*failures, finished.message] if finished.state == "failed" else []
        if len(failures) >= _MAX_FAILURES:
            raise WhetError(
                f"{_MAX_FAILURES} trials in a row failed", got=failures[-1], try_="whet train with the same settings"
            )


def _complete_trial(study: SearchStudy, config: WorkerConfig, claimed: ClaimedTrial) -> FinishedTrial:
    """Train a claimed trial and write its result to the storage."""
    started = time.monotonic()
    parameters = dict(claimed.trial.params)
    value: float | None = None
    steps = 0
    peak_bytes: int | None = None
    state: EndState
    try:
        task = config.prepare(claimed)
        study.set_attribute(claimed.number, RUN, str(task.run))
        state, message = _train_until_done(study, config, claimed, task)
        value, steps = _last_value(task.run, goal=config.goal)
        peak_bytes = _peak_memory(task.run)
    except UsageError as error:
        # Values that are valid on their own may be invalid in combination.
        state, message = "infeasible", f"{error.what}: {error.got}"
    except WhetError as error:
        # An error such as a damaged run folder ends the trial, but not the search.
        state, message = "failed", f"{error.what}: {error.got}"
    seconds = time.monotonic() - started
    # A missing or NaN value cannot be ranked.
    if state == "complete" and (value is None or not math.isfinite(value)):
        state, message = "failed", f"{config.goal} is {value}"
    if state == "stopped":
        state = "stopped" if study.give_up(claimed.number, STOPPED) else "given up"
    else:
        attributes = {STEPS: steps, SECONDS: seconds, MACHINE: config.machine, PEAK_BYTES: peak_bytes}
        if message:
            attributes[INFEASIBLE if state == "infeasible" else FAILURE] = message
        state = state if study.finish(claimed, state=state, value=value, **attributes) else "given up"
    return FinishedTrial(
        number=claimed.number,
        part=config.part,
        parameters=parameters,
        state=state,
        value=value,
        message=message,
        steps=steps,
        seconds=seconds,
    )


def _train_until_done(
    study: SearchStudy, config: WorkerConfig, claimed: ClaimedTrial, task: TrialTask
) -> tuple[EndState, str]:
    """Train a trial, restarting it after kills, until its result is known."""
    may_prune = config.part == "trial"
    _await_lock(task.run)
    reported = dict(_evaluations(task.run, goal=config.goal))
    was_pruned = False
    for number, value in reported.items():
        # A continued trial reports its earlier evaluations again, one at a time, because a pruner checks each of them.
        claimed.trial.report(value, number)
        was_pruned = may_prune and claimed.trial.should_prune()
    if was_pruned and not _is_done(task.run):
        # The previous worker died after the decision to prune and before it was stored.
        return "pruned", ""

    def on_evaluation(number: int, value: float, is_last: bool) -> bool:
        # A resumed process repeats the evaluations after its last checkpoint. Report each evaluation only once.
        if number not in reported:
            claimed.trial.report(value, number)
            reported[number] = value
        return is_last or not (may_prune and claimed.trial.should_prune())

    heartbeat = _Heartbeats(study, claimed.number)
    for kills in range(_MAX_KILLS + 1):
        ended = run_trial_process(
            config.target,
            task.arguments,
            log=task.run.with_suffix(".log"),
            on_evaluation=on_evaluation,
            should_stop=config.should_stop,
            heartbeat=heartbeat,
        )
        # A negative code means that a signal killed the process. Any other exit is final.
        if ended.code >= 0:
            return _end_state(ended)
        if ended.was_stopped:
            return "stopped", ended.killer
        if kills < _MAX_KILLS and (task.run / RUN_FILE).exists():
            _await_lock(task.run)
            # The usual reason for a kill is memory, so the plan may resume with half the micro-batch.
            prepare_restart(task.run, killer=ended.killer, is_first=kills == 0)
    # The kernel sends SIGKILL when memory runs out, so these settings probably do not fit on this machine.
    state: EndState = "infeasible" if ended.killer == "SIGKILL" else "failed"
    return state, f"killed {_MAX_KILLS + 1} times, last by {ended.killer}"


def _end_state(ended: TrialExit) -> tuple[EndState, str]:
    if ended.was_pruned:
        return "pruned", ""
    if ended.was_stopped and ended.code != 0:
        return "stopped", ""
    if ended.code == OUT_OF_MEMORY:
        return "infeasible", f"out of memory: {ended.failure}"
    if ended.code == DIVERGED:
        # Divergence is a bad result of these settings, not a failure of the machine or the recipe.
        return "pruned", f"diverged: {ended.failure}"
    if ended.code == 0:
        return "complete", ""
    return "failed", ended.failure or f"exit code {ended.code}"


def _evaluations(run: Path, *, goal: str) -> Iterator[tuple[int, float]]:
    """Yield the number and the goal metric of each evaluation in the log of a run."""
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


def _last_value(run: Path, *, goal: str) -> tuple[float | None, int]:
    """Return the last value of the goal metric and the number of steps."""
    if not (run / RUN_FILE).exists():
        return None, 0
    history = History(run)
    values = (event.number(goal) for event in history.backwards(kinds=("eval",)))
    last = history.last("step", "end")
    return next((value for value in values if value is not None), None), 0 if last is None else last.step


def _peak_memory(run: Path) -> int | None:
    """Return the highest memory usage that a run has logged, in bytes, or None if it has logged none.

    Each event contributes the first of these values that it contains: peak, reserved and allocated memory of the
    device, memory of the process.
    """
    if not (run / RUN_FILE).exists():
        return None
    readings = (event.get("memory") for event in History(run).events(kinds=("epoch", "health")))
    sizes = [
        next((size for name in ("peak", "reserved", "allocated", "process") if (size := reading.get(name))), 0)
        for reading in readings
        if isinstance(reading, Mapping)
    ]
    return int(max(sizes)) if any(sizes) else None


def _await_lock(run: Path, *, seconds: float = 60.0) -> None:
    """Wait until the process of a killed worker has released the lock of the run folder."""
    deadline = time.monotonic() + seconds
    while (run / RUN_FILE).exists() and lock.is_locked(run) and time.monotonic() < deadline:
        time.sleep(0.1)


class _Heartbeats:
    """Writes a heartbeat of a trial when called, at most every HEARTBEAT_SECONDS."""

    def __init__(self, study: SearchStudy, number: int) -> None:
        self._study = study
        self._number = number
        self._count = 0
        self._written_at = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._written_at >= HEARTBEAT_SECONDS:
            self._written_at = time.monotonic()
            self._count += 1
            self._study.set_attribute(self._number, HEARTBEAT, self._count)


# --- Several workers -------------------------------------------------------------------------------------------------


def devices_for(device: str, *, jobs: int, log: Log) -> list[str]:
    """Return the device of each worker: one worker per GPU, `jobs` workers on the CPU, otherwise a single one."""
    if jobs <= 1:
        return [device]
    from whet.machine.probe import probe_machine

    accelerators = [] if device == "cpu" else list(probe_machine().accelerators)
    if not accelerators:
        return [device] * jobs
    first = accelerators[0]
    if device != "auto" and device != first.kind:
        log(f"--device {device}: one device, so trials run one after the other")
        return [device]
    # Use at most one worker per GPU, because two trials would compete for its memory.
    if first.kind == "cuda" and len(accelerators) > 1:
        return [f"cuda:{number}" for number in range(min(jobs, len(accelerators)))]
    log(f"--jobs {jobs}: there is one {first.name or first.kind}, so trials run one after the other")
    return [device]


def run_together(functions: list[Callable[[], None]], *, stop: threading.Event) -> None:
    """Run each function in a thread. If one of them fails, make the others save and stop."""
    with ThreadPoolExecutor(max_workers=len(functions), thread_name_prefix="worker") as pool:
        futures: list[Future[None]] = [pool.submit(function) for function in functions]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        if any(future.exception() for future in done):
            stop.set()
    for future in futures:
        future.result()


def machine_name() -> str:
    """Return the name and the memory size of this machine, which label infeasible trials."""
    return f"{platform.node()} ({format_bytes(psutil.virtual_memory().total)})"
