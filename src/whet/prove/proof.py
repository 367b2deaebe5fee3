"""Run a proof in a temporary folder and render its result."""

import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from whet.base.version import VERSION
from whet.plan.plan import read_plan
from whet.prove.kills import (
    KillCounter,
    Log,
    ProofFailure,
    ProofRunner,
    ProvableTraining,
    kill_at_disk_calls,
    kill_at_random,
    measure_durations,
)
from whet.prove.launcher import ForkLauncher, Launcher, ProcessLauncher
from whet.run import durable
from whet.run.folder import installed_versions, open_run
from whet.run.proof import ComparedCounts, Proof, ProofDifference, Verdict, why_insufficient

# Limits of the number of steps. It is chosen so that a run takes about TARGET_SECONDS.
MAX_STEPS, MIN_STEPS = 48, 12
NUM_CHECKPOINTS = 12
# Steps of the trial run, which determines the duration of a step and the device.
TRIAL_STEPS = 8
# The target duration of one uninterrupted run.
TARGET_SECONDS = 4.0
DISK_SECONDS = 60.0


@dataclass(kw_only=True, slots=True)
class ProofRequest:
    """The training run to prove, and the options of the proof."""

    training: ProvableTraining
    recipe: str
    scratch: Path
    repeat: str
    log: Log
    kills: int = 20
    seed: int = 0
    steps: int | None = None
    disk_seconds: float = DISK_SECONDS
    """The time budget for all kills at disk calls together."""
    launcher: Launcher | None = None
    """The launcher of processes, or None to choose one by device and operating system."""


def prove(request: ProofRequest) -> tuple[Proof, Path]:
    """Run a proof. Return its result and the folder of the uninterrupted run.

    Raise UsageError or WhetError if training fails without being killed.
    """
    with ExitStack() as stack:
        return _ProofRun(request, stack).run()


class _ProofRun:
    """One proof: a trial run, two uninterrupted runs, kills at disk calls, and kills at random times."""

    def __init__(self, request: ProofRequest, stack: ExitStack) -> None:
        self._request, self._stack = request, stack
        self._created, self._start = time.time(), time.monotonic()
        self._random, self._disk = KillCounter(), KillCounter()
        self._steps = self._calls = 0
        self._device = self._how = "unknown"
        self._runner: ProofRunner | None = None
        # Use different hash seeds for new processes and forks, so that the order of sets of strings differs.
        self._fresh = request.launcher or stack.enter_context(ProcessLauncher(2 * request.seed + 1))

    def run(self) -> tuple[Proof, Path]:
        request, log = self._request, self._request.log
        log(f"seed {request.seed}; a trial run of {TRIAL_STEPS} steps ...")
        steps, every = self._measure_steps()
        launcher = self._choose_launcher()
        log(f"{steps} steps on {self._device}, a checkpoint every {every}; {self._how}")
        runner = self._runner = ProofRunner(request.training, launcher, request.scratch, steps=steps, every=every)
        whole, second = request.scratch / "whole", request.scratch / "second"
        # Run once in a new process and once with the chosen launcher, so that forking cannot hide a difference.
        runner.run_uninterrupted(whole, launcher=self._fresh)
        process = runner.run_uninterrupted(second)
        difference = self._compare_uninterrupted(runner, whole, second)
        if difference is not None:
            return self._proof("cannot be proved", "not deterministic", difference=difference), whole
        # Test the comparison itself: if it misses a flipped bit, it proves nothing.
        if not self._comparison_works(runner):
            return self._proof("cannot be proved", "the comparison does not detect a flipped bit"), whole
        durations = measure_durations(process)
        log(f"two uninterrupted runs are equal in every bit; {process.seconds:.1f} s each")
        # The limit is generous, because the machine may be busier later.
        runner.limit_seconds = max(60.0, 20 * process.seconds)
        try:
            drafts = process.messages("draft")
            if drafts:
                self._calls = kill_at_disk_calls(
                    runner,
                    self._disk,
                    num_drafts=len(drafts),
                    budget_seconds=request.disk_seconds,
                    seed=request.seed,
                    log=log,
                )
            kill_at_random(runner, durations, self._random, kills=request.kills, seed=request.seed, log=log)
        except ProofFailure as failure:
            return self._proof("broken", "an interrupted run is not the same", difference=failure.difference), whole
        missing = why_insufficient(
            self._random.counts, self._disk.counts, self._compared(), num_kills=request.kills, steps=self._steps
        )
        if missing is not None:
            return self._proof("cannot be proved", f"the kills covered too little: {missing}"), whole
        return self._proof("proved", None), whole

    def _measure_steps(self) -> tuple[int, int]:
        """Return the number of steps to train and the steps between checkpoints, based on a short trial run."""
        request = self._request
        runner = ProofRunner(request.training, self._fresh, request.scratch, steps=TRIAL_STEPS, every=2)
        process = runner.run_uninterrupted(request.scratch / "trial")
        run = open_run(request.scratch / "trial")
        self._device = read_plan(run.plan, where=f"{run.path}/plan.json").device
        # Measure between checkpoints, because the first step and the last evaluation may take longer than all others.
        saves = [message["time"] for message in process.messages("draft")][1:]
        step_seconds = (
            (saves[-1] - saves[0]) / TRIAL_STEPS
            if len(saves) > 1
            else measure_durations(process).train_seconds / TRIAL_STEPS
        )
        steps = request.steps or min(MAX_STEPS, max(MIN_STEPS, int(TARGET_SECONDS / max(1e-3, step_seconds))))
        return steps, max(1, steps // NUM_CHECKPOINTS)

    def _choose_launcher(self) -> Launcher:
        """Return a launcher of forks where forking is safe, otherwise one of new processes."""
        request = self._request
        if request.launcher is not None:
            self._how = "each process is started as requested"
            return request.launcher
        why_not = None if sys.platform == "linux" else "a fork aborts once Apple's frameworks have started"
        if why_not is None and self._device != "cpu":
            why_not = f"a fork cannot use {self._device} after its parent did"
        if why_not is None:
            forks = self._stack.enter_context(ForkLauncher(2 * request.seed + 2))
            why_not = forks.load(request.training.target, request.training.arguments)
            if why_not is None:
                self._how = "each process is a fork of one that has imported torch"
                return forks
        self._how = f"each process is a new Python: {why_not}"
        return self._fresh

    def _compare_uninterrupted(self, runner: ProofRunner, whole: Path, second: Path) -> ProofDifference | None:
        from whet.prove.compare import first_difference, nondeterministic_metrics, read_result

        expected, again = read_result(whole), read_result(second)
        runner.expected = expected
        runner.ignored_metrics = nondeterministic_metrics(expected, again)
        self._steps = len(expected.losses)
        return first_difference(expected, again, ignored_metrics=runner.ignored_metrics)

    def _comparison_works(self, runner: ProofRunner) -> bool:
        from whet.prove.compare import detects_differences

        return runner.expected is not None and detects_differences(runner.expected)

    def _compared(self) -> ComparedCounts:
        if self._runner is None or self._runner.expected is None:
            return ComparedCounts()
        return self._runner.expected.compared(
            runs=self._runner.num_compared, ignored_metrics=self._runner.ignored_metrics
        )

    def _proof(self, verdict: Verdict, reason: str | None, *, difference: ProofDifference | None = None) -> Proof:
        request = self._request
        return Proof(
            verdict=verdict,
            reason=reason,
            difference=difference,
            recipe=request.recipe,
            device=self._device,
            steps=self._steps,
            launch=self._how,
            at_random=self._random.counts,
            at_disk_calls=self._disk.counts,
            disk_calls=self._calls,
            compared=self._compared(),
            seed=request.seed,
            repeat=request.repeat,
            whet=VERSION,
            versions=installed_versions(),
            created=self._created,
            seconds=time.monotonic() - self._start,
        )


@contextlib.contextmanager
def scratch_directory(path: Path) -> Iterator[Path]:
    """Create a temporary folder next to `path`, on the same disk. Remove it at the end of the `with` block.

    Results must be moved out of the folder before that. SIGTERM raises SystemExit, so that the folder is removed too.
    """
    made = durable.make_directory(path.parent)
    folder = durable.leftover_name(path)
    durable.make_directory(folder)
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield folder
    finally:
        signal.signal(signal.SIGTERM, before)
        for _ in range(3):
            # Retry, because a process that was just killed may still have been writing.
            shutil.rmtree(folder, ignore_errors=True)
        durable.remove_empty(made)


def _exit(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
