"""Kill training processes at random times and at disk calls, check the crash state and compare the resumed runs."""

import itertools
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.base.errors import UsageError, WhetError
from whet.checkpoint import store
from whet.prove.launcher import Launcher, TrainingProcess
from whet.prove.training_process import ProcessOrder
from whet.run import durable
from whet.run.events import read_events
from whet.run.folder import CHECKPOINTS, RUN_FILE
from whet.run.proof import MIN_RESUMED_FRACTION, KillCounts, ProofDifference

if TYPE_CHECKING:
    from whet.prove.compare import RunResult

# Time limit for a process whose duration is not known yet.
MAX_SECONDS = 3600.0
# A run is finished and compared after at most this many kills.
MAX_KILLS_PER_RUN = 8
# Fraction of the kills that happen while the process starts, for example during imports. The others happen during
# training.
EARLY_SHARE = 0.1
# Kills during training happen within this fraction of the time after the first checkpoint. The rest of the run is left
# to the processes that resume it.
REACH = 0.35
# If too few processes resumed, allow this many more kills, or as many as were requested if that is larger.
MAX_EXTRA_KILLS = 10

Log = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvableTraining:
    """A training run to prove: a function as "module:function", and its arguments.

    The function is called with a run folder and the arguments. The proof adds two arguments: `steps`, the maximum
    number of steps, and `every`, the number of steps between checkpoints. A function `preload(arguments)` in the same
    module may import the modules that training needs.
    """

    target: str
    arguments: dict[str, Any] = field(default_factory=dict)


class ProofFailure(Exception):  # noqa: N818 - a result, not an error
    """Raised when a killed run was not restored exactly."""

    def __init__(self, difference: ProofDifference) -> None:
        super().__init__(difference.what)
        self.difference = difference


@dataclass(frozen=True, kw_only=True, slots=True)
class CrashState:
    """The checkpoints of a run folder after a kill."""

    complete: tuple[int, ...] = ()
    """Steps of checkpoints whose files have the sizes in their manifest."""
    torn: tuple[int, ...] = ()
    """Steps of checkpoints that have their final name, but do not match their manifest."""
    drafts: frozenset[str] = frozenset()
    """Names of temporary folders, left by an interrupted write or removal of a checkpoint."""
    lost: str | None = None
    """Description of a checkpoint that was reported as saved and is missing, or None."""

    def was_interrupted_since(self, before: "CrashState") -> bool:
        """Return whether a checkpoint was being written or removed at the kill between `before` and this state."""
        return bool(self.drafts - before.drafts) or bool(set(self.torn) - set(before.torn))


def read_crash_state(run: Path) -> CrashState:
    """Return the crash state of a run folder. It is empty if the folder is not a run."""
    if not (run / RUN_FILE).exists():
        return CrashState()
    checkpoints = run / CHECKPOINTS
    complete, torn = [], []
    for step in store.list_steps(checkpoints):
        try:
            store.check_sizes(checkpoints / store.checkpoint_name(step))
            complete.append(step)
        except WhetError:
            torn.append(step)
    drafts = {path.name for path in checkpoints.iterdir() if durable.is_leftover(path)} if checkpoints.exists() else ()
    lost = _lost_checkpoint(run, complete)
    return CrashState(complete=tuple(complete), torn=tuple(torn), drafts=frozenset(drafts), lost=lost)


def _lost_checkpoint(run: Path, complete: list[int]) -> str | None:
    """Return a description of a lost checkpoint, or None.

    The newest checkpoint that the log reports as saved, or a newer one, must exist. After two saves, two checkpoints
    must exist.
    """
    saved = {event.step for event in read_events(run, kinds=("checkpoint",))}
    if saved and max(complete, default=-1) < max(saved):
        return f"the checkpoint of step {max(saved)} was reported as saved and is missing"
    if len(complete) < min(2, len(saved)):
        return f"{len(complete)} complete checkpoint is left although {len(saved)} were reported as saved"
    return None


class ProofRunner:
    """Starts training processes, and compares finished runs with an uninterrupted run."""

    def __init__(
        self, training: ProvableTraining, launcher: Launcher, scratch: Path, *, steps: int, every: int
    ) -> None:
        self.launcher = launcher
        self.scratch = scratch
        self.limit_seconds = MAX_SECONDS
        self.expected: RunResult | None = None
        self.ignored_metrics: set[str] = set()
        self.num_compared = 0
        self._target = training.target
        self._arguments = {**training.arguments, "steps": steps, "every": every}
        self._numbers = itertools.count()
        self._processes: list[TrainingProcess] = []

    def start(self, run: Path, *, launcher: Launcher | None = None, **death: int) -> TrainingProcess:
        """Start or resume a run. `death` sets the disk call at which the process kills itself (see ProcessOrder)."""
        number = next(self._numbers)
        order = ProcessOrder(
            target=self._target,
            arguments=self._arguments,
            run=run,
            messages=self.scratch / f"messages-{number}",
            output=self.scratch / f"output-{number}",
            **death,
        )
        self._processes.append((launcher or self.launcher).start(order))
        return self._processes[-1]

    def run_uninterrupted(self, run: Path, *, launcher: Launcher | None = None) -> TrainingProcess:
        """Train to the end. Raise UsageError or WhetError if training fails, because nothing was killed."""
        process = self.start(run, launcher=launcher)
        code = process.wait(self.limit_seconds)
        if code == 0:
            return process
        for failure in process.messages("failed"):
            kind = UsageError if failure["is_usage"] else WhetError
            try_ = failure["try_"] or "whet train, which fails alike: fix that first"
            raise kind(failure["what"], got=failure["got"], try_=try_)
        how = "it did not end" if code is None else f"exit code {code}: {process.failure()}"
        raise WhetError("training fails even without kills", got=how, try_="whet train first")

    def finish(self, run: Path, *, kills: str) -> TrainingProcess:
        """Resume a run until it ends. Raise ProofFailure if it does not."""
        process = self.start(run)
        code = process.wait(self.limit_seconds)
        if code is None:
            what = f"a resumed process did not end in {self.limit_seconds:.0f} s"
            raise ProofFailure(ProofDifference(what=what, kills=kills))
        if code != 0:
            raise ProofFailure(ProofDifference(what=f"a resumed process failed: {process.failure()}", kills=kills))
        return process

    def compare(self, run: Path, *, kills: str) -> None:
        """Compare a finished run with the uninterrupted run. Raise ProofFailure if they differ, else remove it."""
        from whet.prove.compare import first_difference, read_result

        assert self.expected is not None
        difference = first_difference(self.expected, read_result(run), ignored_metrics=self.ignored_metrics)
        if difference is not None:
            update = {"kills": kills, "not_restored": self._variables_not_restored(run)}
            raise ProofFailure(difference.model_copy(update=update))
        self.num_compared += 1
        shutil.rmtree(run)

    def _variables_not_restored(self, run: Path) -> tuple[str, ...]:
        """Return the names of user variables that differed from the uninterrupted run when a process resumed.

        The first two processes are uninterrupted runs. Variables that differ between them, such as times, are ignored.
        """
        whole, second = (_variables(process) for process in self._processes[:2])
        names: dict[str, None] = {}
        for process in self._processes[2:]:
            step = process.resumed_from
            now = _variables(process).get(step)
            if process.order.run == run and now is not None and step in whole:
                before, again = whole[step], second.get(step, {})
                # Ignore variables that are not bound yet: the code must assign them before it can read them.
                bound = {(_variable(name), name.rpartition("` of ")[2]) for name in now}
                steady = [
                    name
                    for name in {**before, **now}
                    if before.get(name) == again.get(name) and (_variable(name), name.rpartition("` of ")[2]) in bound
                ]
                names |= dict.fromkeys(name for name in steady if before.get(name) != now.get(name))
        return tuple(_without_parts(names))


def _variables(process: TrainingProcess) -> dict[int, dict[str, str]]:
    """Return the digests of the user's variables that a process has reported, by step and name."""
    return {message["step"]: message["digests"] for message in process.messages("variables")}


def _variable(name: str) -> str:
    """Return the name of the variable that a value belongs to.

    >>> _variable("`len(carried[0].h)` of main()")
    'carried'
    """
    return re.split(r"[\[.(]", name[1:].removeprefix("len("), maxsplit=1)[0].partition("`")[0].removesuffix(")")


def _without_parts(names: Iterable[str]) -> list[str]:
    """Return one name per variable: that of its first part that differs."""
    first: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"^`len\((.*)\)`", r"`\1`", name)
        # Count each attribute of `self` as a separate variable.
        key = plain if _variable(name) == "self" else _variable(name)
        first.setdefault(key, plain)
    return list(first.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class ProofDurations:
    """Durations of an uninterrupted run."""

    start_seconds: float
    """Seconds from the start of the process to the start of training."""
    train_seconds: float
    """Seconds from the start of training to the end of the process."""
    save_seconds: float
    """Seconds from the start of training to the first checkpoint after step 0. The first step may be very slow."""
    draft_seconds: tuple[float, ...] = ()
    """Seconds from the start of training to the start of each checkpoint, including the checkpoint of step 0."""


def measure_durations(process: TrainingProcess) -> ProofDurations:
    """Return the durations of a process that was not killed."""
    ready = process.start_seconds
    # At least 0.05 s, so that there is an interval to draw random times from.
    train = max(0.05, process.seconds - ready)
    drafts = tuple(message["time"] - process.started - ready for message in process.messages("draft"))
    # drafts[0] is the checkpoint of step 0, and drafts[1] is the next one.
    save = drafts[1] if len(drafts) > 1 else 0.0
    return ProofDurations(start_seconds=ready, train_seconds=train, save_seconds=save, draft_seconds=drafts)


class KillCounter:
    """Counts processes, kills, and the operations that the kills interrupted."""

    def __init__(self) -> None:
        self.counts = KillCounts()

    def add(self, **counts: int) -> None:
        self.counts = self.counts.plus(KillCounts(**counts))

    def killed(self, process: TrainingProcess, before: CrashState, run: Path, *, name: str = "") -> CrashState:
        """Count a kill and return the new crash state. Raise ProofFailure for a torn or lost checkpoint."""
        after = read_crash_state(run)
        self.add(
            kills=1,
            processes=1,
            resumed=int(process.resumed_from > 0),
            inside_save=int(after.was_interrupted_since(before)),
            leftovers=len(after.drafts - before.drafts),
            torn=len(after.torn),
        )
        name = name or f"random kill {self.counts.kills}"
        if after.torn:
            what = f"the checkpoint of step {after.torn[0]} has its final name and is incomplete"
            raise ProofFailure(ProofDifference(what=what, kills=name))
        if after.lost is not None:
            raise ProofFailure(ProofDifference(what=after.lost, kills=name))
        return after

    def finished(self, process: TrainingProcess) -> None:
        """Count a process that finished the run without being killed."""
        self.add(processes=1, resumed=int(process.resumed_from > 0))


# --- At random times -------------------------------------------------------------------------------------------------


def kill_at_random(
    runner: ProofRunner, durations: ProofDurations, counter: KillCounter, *, kills: int, seed: int, log: Log
) -> None:
    """Kill processes at random times, then finish each run and compare it. Raise ProofFailure if one differs."""
    draw = random.Random(seed)
    runs = misses = 0
    while _needs_more(counter.counts, kills) and misses < kills + MAX_EXTRA_KILLS:
        runs += 1
        run, first, state = runner.scratch / f"random-{runs}", counter.counts.kills + 1, CrashState()
        for _ in range(MAX_KILLS_PER_RUN):
            if not _needs_more(counter.counts, kills):
                break
            process = runner.start(run)
            when = _kill_at_random_time(process, durations, draw, complete=state.complete)
            code = process.wait(runner.limit_seconds)
            if code != -signal.SIGKILL:
                misses += 1
                _check_exit(process, code, _kill_numbers(first, counter.counts.kills))
                counter.finished(process)
                break
            before, state = state, counter.killed(process, state, run)
            resumed = f"resumed from {process.resumed_from}, " if process.resumed_from else ""
            place = ", inside a save" if state.was_interrupted_since(before) else ""
            number = counter.counts.kills
            total = f"of {kills}" if number <= kills else "(extra: few processes have resumed)"
            log(f"kill {number:>3} {total}  run {runs}, {resumed}{when}{place}")
        numbers = _kill_numbers(first, counter.counts.kills)
        counter.finished(runner.finish(run, kills=numbers))
        runner.compare(run, kills=numbers)
        log(f"run {runs} is done, and every bit is equal")


def _needs_more(counts: KillCounts, kills: int) -> bool:
    if counts.kills < kills:
        return True
    has_resumed_rarely = counts.resumed < MIN_RESUMED_FRACTION * counts.processes
    return has_resumed_rarely and counts.kills < kills + max(kills, MAX_EXTRA_KILLS)


def _kill_at_random_time(
    process: TrainingProcess, durations: ProofDurations, draw: random.Random, *, complete: tuple[int, ...]
) -> str:
    """Kill the process at a random time, and describe the time. `complete` contains the steps of its checkpoints."""
    is_early, share = draw.random() < EARLY_SHARE, draw.random()
    if is_early:
        seconds = share * durations.start_seconds
        time.sleep(seconds)
        process.kill()
        return f"killed {seconds:.2f} s after its start"
    # The limit is generous, because the machine may be much busier than when the durations were measured.
    timeout = max(60.0, 20 * (durations.start_seconds + durations.train_seconds))
    process.wait_for("ready", timeout)
    # If there is no checkpoint to resume from, kill only after one has been written. Otherwise every process would
    # start from step 0.
    can_resume = max(complete, default=0) > 0
    first = 0.0 if can_resume else durations.save_seconds
    last = durations.save_seconds + REACH * (durations.train_seconds - durations.save_seconds)
    seconds = first + share * (last - first)
    drafts = sum(draft <= seconds for draft in durations.draft_seconds)
    if drafts > 1 and not can_resume:
        # Wait for a number of checkpoints instead of seconds, because the machine may be busier now. If only the
        # checkpoint of step 0 exists, wait until the third checkpoint of the run begins: the second one is complete by
        # then, and the next process resumes from it.
        drafts = min(max(3, drafts), len(durations.draft_seconds)) if complete else drafts
        process.wait_for("draft", timeout, count=drafts - (0 in complete))
        seconds -= durations.draft_seconds[drafts - 1]
    time.sleep(max(0.0, seconds))
    elapsed = time.monotonic() - process.started - process.start_seconds
    process.kill()
    return f"killed after {elapsed:.2f} s of training"


def _kill_numbers(first: int, last: int) -> str:
    return f"random kill {last}" if first >= last else f"random kill {first} to {last}"


def _check_exit(process: TrainingProcess, code: int | None, name: str) -> None:
    """Accept a process that ended before it was killed. Raise ProofFailure if it failed or did not end."""
    if code != 0:
        why = "did not end" if code is None else f"failed: {process.failure()}"
        raise ProofFailure(ProofDifference(what=f"a process {why}", kills=name))


# --- At disk calls ---------------------------------------------------------------------------------------------------


def kill_at_disk_calls(
    runner: ProofRunner, counter: KillCounter, *, num_drafts: int, budget_seconds: float, seed: int, log: Log
) -> int:
    """Kill before each disk call of a resume, save and cleanup, and after the last one. Return the number of calls.

    A kill before a call is equivalent to a kill after the previous call, because only these calls change the disk. The
    calls are tried in random order, seeded by `seed`, until the time budget is used up.
    """
    stopped = runner.scratch / "stopped"
    # Kill in the middle of the last save, so that the calls include the removal of an unfinished checkpoint.
    process = runner.start(stopped, die_in_draft=num_drafts)
    if process.wait(runner.limit_seconds) != -signal.SIGKILL:
        shutil.rmtree(stopped, ignore_errors=True)
        return 0
    name = "a kill inside the last save"
    before = counter.killed(process, CrashState(), stopped, name=name)
    counted = runner.scratch / "counted"
    shutil.copytree(stopped, counted)
    whole = runner.finish(counted, kills=name)
    counter.finished(whole)
    runner.compare(counted, kills=name)
    calls = int(whole.messages("end")[0]["calls"])
    log(f"disk calls: {calls} in a resume, a save and its cleanup")
    deadline = time.monotonic() + budget_seconds
    # Position `calls + 1` means a kill after the last call.
    for at in random.Random(seed).sample(range(1, calls + 2), calls + 1):
        if time.monotonic() > deadline:
            log(f"disk calls: stopped after {budget_seconds:.0f} s; the others are left out")
            break
        run, name = runner.scratch / f"call-{at}", f"disk call {at} of {calls}"
        shutil.copytree(stopped, run)
        process = runner.start(run, die_at=min(at, calls), die_after=at > calls)
        code = process.wait(runner.limit_seconds)
        if code == -signal.SIGKILL:
            counter.killed(process, before, run, name=name)
        else:
            _check_exit(process, code, name)
            counter.finished(process)
        counter.finished(runner.finish(run, kills=name))
        runner.compare(run, kills=name)
        if counter.counts.kills % 20 == 0:
            log(f"kill {counter.counts.kills:>3}  at {name}; every bit is equal")
    shutil.rmtree(stopped)
    return calls
