"""Kills and compares: what a training is put through, in its order, and the verdict at the end."""

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from whet.base.version import VERSION
from whet.plan.plan import read_plan
from whet.prove.bench import Bench, Broken, Say, Training
from whet.prove.births import Births, Forks, Fresh
from whet.prove.kills import Counting, kill_at_disk_calls, kill_at_random, pace_of
from whet.run.folder import open_run, versions
from whet.run.proof import Compared, Difference, Proof, Verdict, too_little

MOST_STEPS, LEAST_STEPS = 48, 12
CHECKPOINTS = 12
"""How many the piece has."""
TRY_STEPS = 8
"""For a first life that shows how fast the training is, and on which device."""
AIM_SECONDS = 4.0
"""How long one uninterrupted piece should take at most."""
DISK_SECONDS = 60.0


@dataclass(kw_only=True, slots=True)
class Question:
    """What is to be proved, how hard it is tried, and who is told."""

    training: Training
    recipe: str
    scratch: Path
    repeat: str
    say: Say
    kills: int = 20
    seed: int = 0
    steps: int | None = None
    disk_seconds: float = DISK_SECONDS
    """For all kills at disk calls together."""
    births: Births | None = None
    """How lives are started; decided by device and system if not given."""


def prove(question: Question) -> tuple[Proof, Path]:
    """The verdict, and the run that nobody interrupted. A training that fails by itself is an error, not a verdict."""
    with ExitStack() as closing:
        return _Proving(question, closing).run()


class _Proving:
    def __init__(self, question: Question, closing: ExitStack) -> None:
        self._question, self._closing = question, closing
        self._began, self._start = time.time(), time.monotonic()
        self._random, self._disk = Counting(), Counting()
        self._steps = self._calls = 0
        self._device = self._how = "unknown"
        self._bench: Bench | None = None
        # Sets of text are ordered in another way in each of the two.
        self._fresh = question.births or closing.enter_context(Fresh(2 * question.seed + 1))

    def run(self) -> tuple[Proof, Path]:
        question, say = self._question, self._question.say
        say(f"seed {question.seed}; a first try of {TRY_STEPS} steps ...")
        steps, every = self._try()
        births = self._births()
        say(f"{steps} steps on {self._device}, a checkpoint every {every}; {self._how}")
        bench = self._bench = Bench(question.training, births, question.scratch, steps=steps, every=every)
        whole = question.scratch / "whole"
        bench.finish_undisturbed(whole, births=self._fresh)
        second = question.scratch / "second"
        life = bench.finish_undisturbed(second)
        unsteady = self._compare_undisturbed(bench, whole, second)
        if unsteady is not None:
            return self._verdict("cannot be proved", "not deterministic", difference=unsteady), whole
        if not self._can_tell(bench):
            return self._verdict("cannot be proved", "the comparison does not notice a flipped bit"), whole
        pace = pace_of(life)
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
        except Broken as broken:
            return self._verdict("broken", "an interrupted run is not the same", difference=broken.difference), whole
        missing = too_little(
            self._random.tally, self._disk.tally, self._compared(), asked=question.kills, steps=self._steps
        )
        if missing is not None:
            return self._verdict("cannot be proved", f"the kills met too little: {missing}"), whole
        return self._verdict("proved", None), whole

    def _try(self) -> tuple[int, int]:
        """How many steps the piece has, and how many lie between checkpoints."""
        question = self._question
        bench = Bench(question.training, self._fresh, question.scratch, steps=TRY_STEPS, every=2)
        life = bench.finish_undisturbed(question.scratch / "try")
        run = open_run(question.scratch / "try")
        self._device = str(read_plan(run.plan, where=f"{run.path}/plan.json").value("device"))
        # Between its checkpoints: a first step and the last evaluation may take longer than all the rest.
        saves = [entry["time"] for entry in life.told("draft")][1:]
        a_step = (saves[-1] - saves[0]) / TRY_STEPS if len(saves) > 1 else pace_of(life).train_seconds / TRY_STEPS
        steps = question.steps or min(MOST_STEPS, max(LEAST_STEPS, int(AIM_SECONDS / max(1e-3, a_step))))
        return steps, max(1, steps // CHECKPOINTS)

    def _births(self) -> Births:
        """Forks where that is safe; else fresh processes, and the reason is said."""
        question = self._question
        if question.births is not None:
            self._how = "each life as it was asked for"
            return question.births
        why_not = None if sys.platform == "linux" else "a fork after Apple's frameworks have started aborts"
        if why_not is None and self._device != "cpu":
            why_not = f"a fork cannot use {self._device} after its parent did"
        if why_not is None:
            forks = self._closing.enter_context(Forks(2 * question.seed + 2))
            why_not = forks.load(question.training.target, question.training.arguments)
            if why_not is None:
                self._how = "each life is a fork of a process that has loaded torch"
                return forks
        self._how = f"each life is a fresh process: {why_not}"
        return self._fresh

    def _compare_undisturbed(self, bench: Bench, whole: Path, second: Path) -> Difference | None:
        from whet.prove.result import first_difference, read_result, unsteady_metrics

        expected, again = read_result(whole), read_result(second)
        bench.expected = expected
        bench.left_out = unsteady_metrics(expected, again)
        self._steps = len(expected.losses)
        return first_difference(expected, again, left_out=bench.left_out)

    def _can_tell(self, bench: Bench) -> bool:
        from whet.prove.result import can_tell

        return bench.expected is not None and can_tell(bench.expected)

    def _compared(self) -> Compared:
        if self._bench is None or self._bench.expected is None:
            return Compared()
        return self._bench.expected.compared(runs=self._bench.num_compared, left_out=self._bench.left_out)

    def _verdict(self, verdict: Verdict, reason: str | None, *, difference: Difference | None = None) -> Proof:
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
            versions=versions(),
            created=self._began,
            seconds=time.monotonic() - self._start,
        )
