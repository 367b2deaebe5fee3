"""When is a training killed? At random instants, and at every call that changes the disk."""

import random
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from whet.prove.bench import Bench, Broken, Say
from whet.prove.births import Life
from whet.prove.remains import Remains, look
from whet.run.proof import LEAST_RESUMED, Difference, Tally

MOST_KILLS_PER_RUN = 8
EARLY_SHARE = 0.1
"""The share of kills that may fall anywhere from the birth of a life; the others fall while it trains."""
REACH = 0.35
"""Kills reach this share of the training beyond its first checkpoint: each next life is killed further on."""
MOST_EXTRA = 10
"""Where kills met too little, up to so many more are tried, and at least as many more as were asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How long the piece takes."""

    start_seconds: float
    """From birth to the first step."""
    train_seconds: float
    """From there to the end."""
    save_seconds: float
    """From there to the first checkpoint after a step; a first step may take longer than all others together."""
    draft_seconds: tuple[float, ...] = ()
    """From there to the begin of each checkpoint, that of step 0 included."""


def pace_of(life: Life) -> Pace:
    """From the times of a life that nobody disturbed."""
    ready = life.ready_after()
    train = max(0.05, life.seconds - ready)
    drafts = tuple(entry["time"] - life.began - ready for entry in life.told("draft"))
    save = drafts[1] if len(drafts) > 1 else 0.0
    return Pace(start_seconds=ready, train_seconds=train, save_seconds=save, draft_seconds=drafts)


class Counting:
    """Adds up what kills met; numbers them."""

    def __init__(self) -> None:
        self.tally = Tally()

    def add(self, **counts: int) -> None:
        """More of these."""
        self.tally = self.tally.plus(Tally(**counts))

    def killed(self, life: Life, before: Remains, run: Path, *, name: str = "") -> Remains:
        """Looks at what a killed life left behind; a torn or lost checkpoint is the end of the proof."""
        after = look(run)
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
            raise Broken(Difference(what=what, kills=number))
        if after.lost is not None:
            raise Broken(Difference(what=after.lost, kills=number))
        return after

    def finished(self, life: Life) -> None:
        """A life that reached the end."""
        self.add(lives=1, resumed=int(life.resumed_from > 0))


# --- at random instants ----------------------------------------------------------------------------------------------


def kill_at_random(bench: Bench, pace: Pace, counting: Counting, *, kills: int, seed: int, say: Say) -> None:
    """Kills lives at instants drawn from `seed`, lets each run finish and compares it; raises Broken at the first."""
    draw = random.Random(seed)
    runs = misses = 0
    while _wants_more(counting.tally, kills) and misses < kills + MOST_EXTRA:
        runs += 1
        run, first, remains = bench.scratch / f"random-{runs}", counting.tally.kills + 1, Remains()
        for _ in range(MOST_KILLS_PER_RUN):
            if not _wants_more(counting.tally, kills):
                break
            life = bench.begin(run)
            when = _strike(life, pace, draw, whole=remains.whole)
            code = life.wait(bench.limit_seconds)
            if code != -signal.SIGKILL:
                misses += 1
                _refuse_failure(life, code, _names(first, counting.tally.kills))
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


def _wants_more(tally: Tally, kills: int) -> bool:
    if tally.kills < kills:
        return True
    has_shown_little = tally.resumed < LEAST_RESUMED * tally.lives
    return has_shown_little and tally.kills < kills + max(kills, MOST_EXTRA)


def _strike(life: Life, pace: Pace, draw: random.Random, *, whole: tuple[int, ...]) -> str:
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


def _refuse_failure(life: Life, code: int | None, name: str) -> None:
    """A life that was to be killed and ended before: by itself, or with a failure."""
    if code != 0:
        why = "did not end" if code is None else f"failed: {life.last_words()}"
        raise Broken(Difference(what=f"a life {why}", kills=name))


# --- at disk calls ---------------------------------------------------------------------------------------------------


def kill_at_disk_calls(
    bench: Bench, counting: Counting, *, num_drafts: int, budget_seconds: float, seed: int, say: Say
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
    before = counting.killed(life, Remains(), stopped, name=name)
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
            _refuse_failure(life, code, name)
            counting.finished(life)
        counting.finished(bench.finish(run, kills=name))
        bench.judge(run, kills=name)
        if counting.tally.kills % 20 == 0:
            say(f"kill {counting.tally.kills:>3}  at {name}; every bit is equal")
    shutil.rmtree(stopped)
    return calls
