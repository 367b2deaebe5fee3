"""Kills trainings at random times and at disk calls, and checks the crash state."""

import itertools
import random
import shutil
import signal
import time
from collections.abc import Callable
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


LONGEST_SECONDS = 3600.0
"""For a life of which nothing is known yet."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvableTraining:
    """What is proved: a function as module:function that trains in a run folder, and what it is told.

    Of its arguments the proof sets `steps`, how many it makes at most, and `every`, the steps between checkpoints. A
    function `rehearse(arguments)` beside it may load what the training will import.
    """

    target: str
    arguments: dict[str, Any] = field(default_factory=dict)


class ProofFailure(Exception):  # noqa: N818 - a finding, not an error
    """Something was not as it should be after a kill."""

    def __init__(self, difference: ProofDifference) -> None:
        super().__init__(difference.what)
        self.difference = difference


class ProofRunner:
    """Starts lives of the same piece of a training."""

    def __init__(self, training: ProvableTraining, births: Launcher, scratch: Path, *, steps: int, every: int) -> None:
        self.births = births
        self.scratch = scratch
        self.limit_seconds = LONGEST_SECONDS
        self.expected: RunResult | None = None
        self.left_out: set[str] = set()
        self.num_compared = 0
        self._target = training.target
        self._arguments = {**training.arguments, "steps": steps, "every": every}
        self._numbers = itertools.count()

    def begin(self, run: Path, *, births: Launcher | None = None, **last: int) -> TrainingProcess:
        """A life that begins in a run folder or goes on there; `last` says which disk call it ends at (see Order)."""
        number = next(self._numbers)
        order = ProcessOrder(
            target=self._target,
            arguments=self._arguments,
            run=run,
            diary=self.scratch / f"diary-{number}",
            errors=self.scratch / f"errors-{number}",
            **last,
        )
        return (births or self.births).start(order)

    def finish_undisturbed(self, run: Path, *, births: Launcher | None = None) -> TrainingProcess:
        """A whole run that nobody interrupts; a training that fails by itself is an error of its own."""
        life = self.begin(run, births=births)
        code = life.wait(self.limit_seconds)
        if code == 0:
            return life
        for told in life.told("failed"):
            kind = UsageError if told.get("is_usage") else WhetError
            raise kind(told["what"], got=told.get("got"), try_=told.get("try_") or "whet train fails alike: mend that")
        how = "it did not end" if code is None else f"exit code {code}: {life.last_words()}"
        raise WhetError("the training fails by itself, before any kill", got=how, try_="whet train first")

    def finish(self, run: Path, *, kills: str) -> TrainingProcess:
        """One more life, which must reach the end."""
        life = self.begin(run)
        code = life.wait(self.limit_seconds)
        if code is None:
            raise ProofFailure(
                ProofDifference(what=f"a resumed life did not end in {self.limit_seconds:.0f} s", kills=kills)
            )
        if code != 0:
            raise ProofFailure(ProofDifference(what=f"a resumed life failed: {life.last_words()}", kills=kills))
        return life

    def judge(self, run: Path, *, kills: str) -> None:
        """Compares a finished run with the one that nobody interrupted; it is removed when all is the same."""
        from whet.prove.compare import first_difference, read_result

        assert self.expected is not None
        found = first_difference(self.expected, read_result(run), left_out=self.left_out)
        if found is not None:
            raise ProofFailure(found.model_copy(update={"kills": kills}))
        self.num_compared += 1
        shutil.rmtree(run)


@dataclass(frozen=True, kw_only=True, slots=True)
class CrashState:
    """A run folder as a killed life left it."""

    whole: tuple[int, ...] = ()
    """Steps of the checkpoints whose manifest vouches for what is there."""
    torn: tuple[int, ...] = ()
    """Steps of those that have their name and are not whole."""
    drafts: frozenset[str] = frozenset()
    """Unfinished folders of checkpoints, being written or removed."""
    lost: str | None = None
    """Which checkpoint that was said to be safe is not there."""

    def was_cut_since(self, before: "CrashState") -> bool:
        """Whether the writing or removal of a checkpoint was cut short by the newest kill."""
        return bool(self.drafts - before.drafts) or bool(set(self.torn) - set(before.torn))


def read_crash_state(run: Path) -> CrashState:
    """What is there now; nothing before the run folder has its name."""
    if not (run / RUN_FILE).exists():
        return CrashState()
    checkpoints = run / CHECKPOINTS
    whole, torn = [], []
    for step in store.list_steps(checkpoints):
        try:
            store.check_sizes(checkpoints / store.checkpoint_name(step))
            whole.append(step)
        except WhetError:
            torn.append(step)
    drafts = {path.name for path in checkpoints.iterdir() if durable.is_leftover(path)} if checkpoints.exists() else ()
    return CrashState(whole=tuple(whole), torn=tuple(torn), drafts=frozenset(drafts), lost=_lost(run, whole))


def _lost(run: Path, whole: list[int]) -> str | None:
    """A checkpoint event says that it is safe: then it is there, or a newer one; and two, once there were two."""
    safe = {event.step for event in read_events(run, kinds=("checkpoint",))}
    if safe and max(whole, default=-1) < max(safe):
        return f"the checkpoint of step {max(safe)} was said to be safe and is not there"
    if len(whole) < min(2, len(safe)):
        return f"{len(whole)} whole checkpoint is left although {len(safe)} were said to be safe"
    return None


MOST_KILLS_PER_RUN = 8
EARLY_SHARE = 0.1
"""The share of kills that may fall anywhere from the birth of a life; the others fall while it trains."""
REACH = 0.35
"""Kills reach this share of the training beyond its first checkpoint: each next life is killed further on."""
MOST_EXTRA = 10
"""Where kills met too little, up to so many more are tried, and at least as many more as were asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProofPace:
    """How long the piece takes."""

    start_seconds: float
    """From birth to the first step."""
    train_seconds: float
    """From there to the end."""
    save_seconds: float
    """From there to the first checkpoint after a step; a first step may take longer than all others together."""
    draft_seconds: tuple[float, ...] = ()
    """From there to the begin of each checkpoint, that of step 0 included."""


def measure_pace(life: TrainingProcess) -> ProofPace:
    """From the times of a life that nobody disturbed."""
    ready = life.ready_after()
    train = max(0.05, life.seconds - ready)
    drafts = tuple(entry["time"] - life.began - ready for entry in life.told("draft"))
    save = drafts[1] if len(drafts) > 1 else 0.0
    return ProofPace(start_seconds=ready, train_seconds=train, save_seconds=save, draft_seconds=drafts)


class KillCounter:
    """Adds up what kills met; numbers them."""

    def __init__(self) -> None:
        self.tally = KillCounts()

    def add(self, **counts: int) -> None:
        """More of these."""
        self.tally = self.tally.plus(KillCounts(**counts))

    def killed(self, life: TrainingProcess, before: CrashState, run: Path, *, name: str = "") -> CrashState:
        """Looks at what a killed life left behind; a torn or lost checkpoint is the end of the proof."""
        after = read_crash_state(run)
        cut = after.was_cut_since(before)
        self.add(
            kills=1,
            lives=1,
            resumed=int(life.resumed_from > 0),
            inside_save=int(cut),
            leftovers=len(after.drafts - before.drafts),
            torn=len(after.torn),
        )
        number = name or f"random kill {self.tally.kills}"
        if after.torn:
            what = f"the checkpoint of step {after.torn[0]} has its name and is not whole"
            raise ProofFailure(ProofDifference(what=what, kills=number))
        if after.lost is not None:
            raise ProofFailure(ProofDifference(what=after.lost, kills=number))
        return after

    def finished(self, life: TrainingProcess) -> None:
        """A life that reached the end."""
        self.add(lives=1, resumed=int(life.resumed_from > 0))


# --- at random instants ----------------------------------------------------------------------------------------------


def kill_at_random(
    bench: ProofRunner, pace: ProofPace, counting: KillCounter, *, kills: int, seed: int, say: Say
) -> None:
    """Kills lives at instants drawn from `seed`, lets each run finish and compares it; raises Broken at the first."""
    draw = random.Random(seed)
    runs = misses = 0
    while _wants_more(counting.tally, kills) and misses < kills + MOST_EXTRA:
        runs += 1
        run, first, remains = bench.scratch / f"random-{runs}", counting.tally.kills + 1, CrashState()
        for _ in range(MOST_KILLS_PER_RUN):
            if not _wants_more(counting.tally, kills):
                break
            life = bench.begin(run)
            when = _kill_at_random_time(life, pace, draw, whole=remains.whole)
            code = life.wait(bench.limit_seconds)
            if code != -signal.SIGKILL:
                misses += 1
                _check_exit(life, code, _names(first, counting.tally.kills))
                counting.finished(life)
                break
            before, remains = remains, counting.killed(life, remains, run)
            at = f"resumed from {life.resumed_from}, " if life.resumed_from else ""
            place = ", inside a save" if remains.was_cut_since(before) else ""
            say(f"kill {counting.tally.kills:>3} of {kills}  run {runs}, {at}{when}{place}")
        names = _names(first, counting.tally.kills)
        counting.finished(bench.finish(run, kills=names))
        bench.judge(run, kills=names)
        say(f"run {runs} is done, and every bit is equal")


def _wants_more(tally: KillCounts, kills: int) -> bool:
    if tally.kills < kills:
        return True
    has_shown_little = tally.resumed < MIN_RESUMED_FRACTION * tally.lives
    return has_shown_little and tally.kills < kills + max(kills, MOST_EXTRA)


def _kill_at_random_time(life: TrainingProcess, pace: ProofPace, draw: random.Random, *, whole: tuple[int, ...]) -> str:
    """Waits for a random instant and kills; when that was, in words. `whole` are the checkpoints before this life."""
    is_early, share = draw.random() < EARLY_SHARE, draw.random()
    if is_early:
        seconds = share * pace.start_seconds
        time.sleep(seconds)
        life.kill()
        return f"killed {seconds:.2f} s after its birth"
    patience = max(60.0, 20 * (pace.start_seconds + pace.train_seconds))
    life.wait_until("ready", patience)
    # Where there is no checkpoint to go on from yet, the kill waits for one: else every life would begin anew.
    has_resumable = max(whole, default=0) > 0
    first = 0.0 if has_resumable else pace.save_seconds
    last = pace.save_seconds + REACH * (pace.train_seconds - pace.save_seconds)
    seconds = first + share * (last - first)
    drafts = sum(draft <= seconds for draft in pace.draft_seconds)
    if drafts > 1 and not has_resumable:
        # Counted in checkpoints, not in seconds: the machine may be busier now than it was for the life that set the
        # pace. Where a life has left none but the first, this one leaves another: the one before that which it begins.
        drafts = min(max(3, drafts), len(pace.draft_seconds)) if whole else drafts
        life.wait_until("draft", patience, times=drafts - (0 in whole))
        seconds -= pace.draft_seconds[drafts - 1]
    time.sleep(max(0.0, seconds))
    into = time.monotonic() - life.began - life.ready_after()
    life.kill()
    return f"killed {into:.2f} s into its training"


def _names(first: int, last: int) -> str:
    return f"random kill {last}" if first >= last else f"random kill {first} to {last}"


def _check_exit(life: TrainingProcess, code: int | None, name: str) -> None:
    """A life that was to be killed and ended before: by itself, or with a failure."""
    if code != 0:
        why = "did not end" if code is None else f"failed: {life.last_words()}"
        raise ProofFailure(ProofDifference(what=f"a life {why}", kills=name))


# --- at disk calls ---------------------------------------------------------------------------------------------------


def kill_at_disk_calls(
    bench: ProofRunner, counting: KillCounter, *, num_drafts: int, budget_seconds: float, seed: int, say: Say
) -> int:
    """Kills before each call of a resume, the save after it and its tidying, and after the last; how many calls.

    Before a call is after the one before it: what a disk holds changes with its calls only. They come in an order drawn
    from `seed`, as many as the budget has time for.
    """
    stopped = bench.scratch / "stopped"
    # In the middle of the last save, so that what a cut leaves behind is there and its removal among the calls.
    life = bench.begin(stopped, die_in_draft=num_drafts)
    if life.wait(bench.limit_seconds) != -signal.SIGKILL:
        shutil.rmtree(stopped, ignore_errors=True)
        return 0
    name = "a kill inside the last save"
    before = counting.killed(life, CrashState(), stopped, name=name)
    counted = bench.scratch / "counted"
    shutil.copytree(stopped, counted)
    whole = bench.finish(counted, kills=name)
    counting.finished(whole)
    bench.judge(counted, kills=name)
    calls = int(whole.told("end")[0]["calls"])
    say(f"disk calls: {calls} of a resume, a save and its tidying")
    deadline = time.monotonic() + budget_seconds
    for at in random.Random(seed).sample(range(1, calls + 2), calls + 1):
        if time.monotonic() > deadline:
            say(f"disk calls: {budget_seconds:.0f} s are over; the others are left out")
            break
        run, name = bench.scratch / f"call-{at}", f"disk call {at} of {calls}"
        shutil.copytree(stopped, run)
        life = bench.begin(run, die_at=min(at, calls), die_after=at > calls)
        code = life.wait(bench.limit_seconds)
        if code == -signal.SIGKILL:
            counting.killed(life, before, run, name=name)
        else:
            _check_exit(life, code, name)
            counting.finished(life)
        counting.finished(bench.finish(run, kills=name))
        bench.judge(run, kills=name)
        if counting.tally.kills % 20 == 0:
            say(f"kill {counting.tally.kills:>3}  at {name}; every bit is equal")
    shutil.rmtree(stopped)
    return calls
