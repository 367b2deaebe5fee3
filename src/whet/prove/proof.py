"""Runs a proof in a scratch folder and renders its verdict."""

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

from whet.base.units import format_bytes, format_seconds
from whet.base.version import VERSION
from whet.plan.plan import read_plan
from whet.prove.kills import (
    KillCounter,
    ProofFailure,
    ProofRunner,
    ProvableTraining,
    Say,
    kill_at_disk_calls,
    kill_at_random,
    measure_pace,
)
from whet.prove.launcher import ForkLauncher, Launcher, ProcessLauncher
from whet.run import durable
from whet.run.folder import installed_versions, open_run
from whet.run.proof import ComparedCounts, KillCounts, Proof, ProofDifference, Verdict, why_insufficient

MOST_STEPS, LEAST_STEPS = 48, 12
CHECKPOINTS = 12
"""How many the piece has."""
TRY_STEPS = 8
"""For a first life that shows how fast the training is, and on which device."""
AIM_SECONDS = 4.0
"""How long one uninterrupted piece should take at most."""
DISK_SECONDS = 60.0


@dataclass(kw_only=True, slots=True)
class ProofRequest:
    """What is to be proved, how hard it is tried, and who is told."""

    training: ProvableTraining
    recipe: str
    scratch: Path
    repeat: str
    say: Say
    kills: int = 20
    seed: int = 0
    steps: int | None = None
    disk_seconds: float = DISK_SECONDS
    """For all kills at disk calls together."""
    births: Launcher | None = None
    """How lives are started; decided by device and system if not given."""


def prove(question: ProofRequest) -> tuple[Proof, Path]:
    """The verdict, and the run that nobody interrupted. A training that fails by itself is an error, not a verdict."""
    with ExitStack() as closing:
        return _ProofRun(question, closing).run()


class _ProofRun:
    def __init__(self, question: ProofRequest, closing: ExitStack) -> None:
        self._question, self._closing = question, closing
        self._began, self._start = time.time(), time.monotonic()
        self._random, self._disk = KillCounter(), KillCounter()
        self._steps = self._calls = 0
        self._device = self._how = "unknown"
        self._bench: ProofRunner | None = None
        # Sets of text are ordered in another way in each of the two.
        self._fresh = question.births or closing.enter_context(ProcessLauncher(2 * question.seed + 1))

    def run(self) -> tuple[Proof, Path]:
        question, say = self._question, self._question.say
        say(f"seed {question.seed}; a first try of {TRY_STEPS} steps ...")
        steps, every = self._try()
        births = self._births()
        say(f"{steps} steps on {self._device}, a checkpoint every {every}; {self._how}")
        bench = self._bench = ProofRunner(question.training, births, question.scratch, steps=steps, every=every)
        whole = question.scratch / "whole"
        bench.finish_undisturbed(whole, births=self._fresh)
        second = question.scratch / "second"
        life = bench.finish_undisturbed(second)
        unsteady = self._compare_undisturbed(bench, whole, second)
        if unsteady is not None:
            return self._verdict("cannot be proved", "not deterministic", difference=unsteady), whole
        if not self._can_tell(bench):
            return self._verdict("cannot be proved", "the comparison does not notice a flipped bit"), whole
        pace = measure_pace(life)
        say(f"two runs that nobody interrupted are equal in every bit; {life.seconds:.1f} s each")
        bench.limit_seconds = max(60.0, 20 * life.seconds)
        try:
            drafts = life.told("draft")
            if drafts:
                self._calls = kill_at_disk_calls(
                    bench,
                    self._disk,
                    num_drafts=len(drafts),
                    budget_seconds=question.disk_seconds,
                    seed=question.seed,
                    say=say,
                )
            kill_at_random(bench, pace, self._random, kills=question.kills, seed=question.seed, say=say)
        except ProofFailure as broken:
            return self._verdict("broken", "an interrupted run is not the same", difference=broken.difference), whole
        missing = why_insufficient(
            self._random.tally, self._disk.tally, self._compared(), asked=question.kills, steps=self._steps
        )
        if missing is not None:
            return self._verdict("cannot be proved", f"the kills met too little: {missing}"), whole
        return self._verdict("proved", None), whole

    def _try(self) -> tuple[int, int]:
        """How many steps the piece has, and how many lie between checkpoints."""
        question = self._question
        bench = ProofRunner(question.training, self._fresh, question.scratch, steps=TRY_STEPS, every=2)
        life = bench.finish_undisturbed(question.scratch / "try")
        run = open_run(question.scratch / "try")
        self._device = str(read_plan(run.plan, where=f"{run.path}/plan.json").device)
        # Between its checkpoints: a first step and the last evaluation may take longer than all the rest.
        saves = [entry["time"] for entry in life.told("draft")][1:]
        a_step = (saves[-1] - saves[0]) / TRY_STEPS if len(saves) > 1 else measure_pace(life).train_seconds / TRY_STEPS
        steps = question.steps or min(MOST_STEPS, max(LEAST_STEPS, int(AIM_SECONDS / max(1e-3, a_step))))
        return steps, max(1, steps // CHECKPOINTS)

    def _births(self) -> Launcher:
        """Forks where that is safe; else fresh processes, and the reason is said."""
        question = self._question
        if question.births is not None:
            self._how = "each life as it was asked for"
            return question.births
        why_not = None if sys.platform == "linux" else "a fork after Apple's frameworks have started aborts"
        if why_not is None and self._device != "cpu":
            why_not = f"a fork cannot use {self._device} after its parent did"
        if why_not is None:
            forks = self._closing.enter_context(ForkLauncher(2 * question.seed + 2))
            why_not = forks.load(question.training.target, question.training.arguments)
            if why_not is None:
                self._how = "each life is a fork of a process that has loaded torch"
                return forks
        self._how = f"each life is a fresh process: {why_not}"
        return self._fresh

    def _compare_undisturbed(self, bench: ProofRunner, whole: Path, second: Path) -> ProofDifference | None:
        from whet.prove.compare import first_difference, read_result, unsteady_metrics

        expected, again = read_result(whole), read_result(second)
        bench.expected = expected
        bench.left_out = unsteady_metrics(expected, again)
        self._steps = len(expected.losses)
        return first_difference(expected, again, left_out=bench.left_out)

    def _can_tell(self, bench: ProofRunner) -> bool:
        from whet.prove.compare import can_tell

        return bench.expected is not None and can_tell(bench.expected)

    def _compared(self) -> ComparedCounts:
        if self._bench is None or self._bench.expected is None:
            return ComparedCounts()
        return self._bench.expected.compared(runs=self._bench.num_compared, left_out=self._bench.left_out)

    def _verdict(self, verdict: Verdict, reason: str | None, *, difference: ProofDifference | None = None) -> Proof:
        question = self._question
        return Proof(
            verdict=verdict,
            reason=reason,
            difference=difference,
            recipe=question.recipe,
            device=self._device,
            steps=self._steps,
            births=self._how,
            at_random=self._random.tally,
            at_disk_calls=self._disk.tally,
            disk_calls=self._calls,
            compared=self._compared(),
            seed=question.seed,
            repeat=question.repeat,
            whet=VERSION,
            versions=installed_versions(),
            created=self._began,
            seconds=time.monotonic() - self._start,
        )


@contextlib.contextmanager
def scratch_beside(path: Path) -> Iterator[Path]:
    """A folder on the disk of `path`, with a name that `whet runs --prune` knows; removed at the end.

    SIGTERM ends the proof as Ctrl-C does. What is to stay must be moved out of the folder.
    """
    made = durable.make_directory(path.parent)
    folder = durable.leftover_name(path)
    durable.make_directory(folder)
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        yield folder
    finally:
        signal.signal(signal.SIGTERM, before)
        for _ in range(3):
            # A life that was killed a moment ago may still have been writing.
            shutil.rmtree(folder, ignore_errors=True)
        durable.remove_empty(made)


def _stop(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def render_proof(proof: Proof) -> list[str]:
    """The verdict first, then what it rests on."""
    lines = [_line(proof.verdict, f"{proof.recipe}: {_short_reason(proof)}")]
    if proof.difference is not None:
        where = f"; after {proof.difference.kills}" if proof.difference.kills else ""
        lines.append(_line("differs", proof.difference.what + where))
    piece = f"{proof.steps} steps on {proof.device}"
    lines.append(_line("piece", piece + "".join(f"; {change}" for change in proof.shortened)))
    lines.append(_line("at random", _tally(proof.at_random)))
    lines.append(
        _line(
            "disk calls",
            f"{proof.disk_calls} calls of a resume, a save and its tidying; " + _tally(proof.at_disk_calls),
        )
    )
    compared = proof.compared
    left_out = f"; left out: {', '.join(compared.left_out)}" if compared.left_out else ""
    lines.append(
        _line(
            "compared",
            f"{compared.runs} interrupted runs with one that was not: {compared.tensors} tensors "
            f"({format_bytes(compared.bytes)}), {compared.losses} losses, {compared.metrics} metrics and all facts"
            f"{left_out}",
        )
    )
    lines.append(_line("lives", proof.births))
    lines.append(_line("repeat", f"{proof.repeat} ({format_seconds(proof.seconds)})"))
    return lines


def _short_reason(proof: Proof) -> str:
    if proof.verdict == "proved":
        return "killed, resumed, and every bit is equal"
    return proof.reason or ""


def _tally(tally: KillCounts) -> str:
    return (
        f"{tally.kills} kills, {tally.inside_save} inside a save; {tally.lives} lives, {tally.resumed} resumed; "
        f"{tally.leftovers} left-overs, {tally.torn} torn"
    )


def _line(label: str, text: str) -> str:
    return f"{label:<18}{text}"
