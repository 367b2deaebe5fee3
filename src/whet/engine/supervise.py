"""The parent of a training: waits, passes signals on, and starts the training again when it was killed. No torch here.

A killed training (-9 is how macOS and Linux answer a lack of memory) goes on with the same plan. Killed again soon, or
after memory pressure was seen, it goes on with half the micro-batch, and the run says since when it is not bit-exact.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from whet.base import env
from whet.plan.lowering import with_smaller_micro_batch
from whet.plan.plan import read_plan
from whet.run import lock
from whet.run.event import SITTINGS
from whet.run.events import EventLog, History
from whet.run.folder import open_run, rewrite

VARIABLE = "WHET_SUPERVISOR"
"""In a supervised process: the parent's id and the descriptor on which the parent is told of the run folder."""

SOON_STEPS = 20
"""A training that was killed before it made so many steps is taken to need less memory."""

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """One training process, ended."""

    code: int
    """Its exit code; minus the signal that killed it."""
    run: Path | None
    """The run folder it said it trains in."""
    was_asked_to_stop: bool


def is_supervised() -> bool:
    """Whether a parent watches over this process."""
    said = env.read(VARIABLE)
    return said is not None and said.partition(":")[0] == str(os.getppid())


def tell_parent(run: Path) -> None:
    """Names the run folder to the parent, if there is one."""
    if is_supervised():
        descriptor = int((env.read(VARIABLE) or "").partition(":")[2])
        with contextlib.suppress(OSError):
            os.write(descriptor, json.dumps(str(run.resolve())).encode() + b"\n")


def supervise(command: Callable[[Path | None], Sequence[str]], *, max_restarts: int, say: Callable[[str], None]) -> int:
    """Runs a training until it ends by itself; its exit code.

    `command` makes the words of whet: for None the first time, for the run folder when it is to go on.
    """
    words, num_restarts = command(None), 0
    while True:
        life = _live(words)
        if life.code >= 0:
            return life.code
        name = signal.Signals(-life.code).name
        if life.run is None or life.was_asked_to_stop:
            return 128 - life.code
        if num_restarts == max_restarts:
            say(
                f"the training was killed by {name} again, after {num_restarts} restarts; --max-restarts allows no more"
            )
            return 128 - life.code
        num_restarts += 1
        say(f"the training was killed by {name}; {make_ready(life.run, is_first=num_restarts == 1)}")
        words = command(life.run)


def make_ready(run: Path, *, is_first: bool) -> str:
    """Prepares a run whose process was killed to go on; what was done, in words."""
    opened = open_run(run)
    history = History(opened)
    began = next((event.step for event in history.backwards(kinds=SITTINGS)), 0)
    reached = max((event.step for event in _sitting(history) if event.kind == "step"), default=began)
    has_pressure = any(e.kind == "pressure" and e.get("level") != "normal" for e in _sitting(history))
    plan = read_plan(opened.plan, where=f"{run}/plan.json")
    micro = plan.value("micro_batch")
    assert isinstance(micro, int)
    if not has_pressure and (is_first or reached - began >= SOON_STEPS):
        return f"it goes on with the same plan, after step {reached:,} or from the last checkpoint before it"
    why = "after memory pressure" if has_pressure else f"within {SOON_STEPS} steps of the last time"
    if micro == 1 or plan.workload.has_batchnorm:
        what = "BatchNorm forbids a smaller micro-batch" if micro > 1 else "the micro-batch is 1 already"
        return f"{why}; {what}, so it goes on with the same plan"
    reason = f"micro batch {micro} was killed {why} at step {reached:,}"
    less = with_smaller_micro_batch(plan, micro // 2, reason=reason, problem="killed")
    with lock.acquire(run), EventLog(opened) as log:
        rewrite(opened, plan=less.as_json())
        cure = f"micro batch {less.value('micro_batch')} instead of {micro}"
        log.append("oom", step=reached, reason=reason, cure=cure, exact=False)
    return f"{why}, so it goes on with {cure}"


def _sitting(history: History) -> Iterator[Any]:
    """The events of the newest sitting, the newest first."""
    for event in history.backwards():
        if event.kind in SITTINGS:
            return
        yield event


def _live(words: Sequence[str]) -> Life:
    reading, writing = os.pipe()
    mark = f"{os.getpid()}:{writing}"
    # A group of its own: Ctrl-C at the terminal reaches this process alone, which passes it on once.
    child = subprocess.Popen(
        [sys.executable, "-m", "whet", *words],
        env=env.for_child(**{VARIABLE: mark}),
        pass_fds=(writing,),
        process_group=0,
    )
    os.close(writing)
    with _forwarding(child) as asked:
        code = child.wait()
    # Not to the end: workers of the dead process may hold the other side for some seconds.
    os.set_blocking(reading, False)
    with contextlib.closing(os.fdopen(reading, "rb", buffering=0)) as told:
        lines = (told.read(65_536) or b"").splitlines()
    return Life(code=code, run=Path(json.loads(lines[-1])) if lines else None, was_asked_to_stop=bool(asked))


@contextlib.contextmanager
def _forwarding(child: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """While entered, signals that ask to stop go to the child; the list holds those that came."""
    asked: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def stop_both(_number: int, _frame: FrameType | None) -> None:
        child.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        child.send_signal(signal.SIGCONT)

    handlers: dict[int, Any] = {**dict.fromkeys(_FORWARDED, forward), signal.SIGTSTP: stop_both}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_with_parent() -> None:
    """Ends this process when its parent is killed: who kills whet means the training too."""
    if not is_supervised():
        return
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    threading.Thread(target=_watch_parent, daemon=True, name="parent").start()


def _watch_parent() -> None:
    """Where the system does not do it: the training is asked to stop, and saves."""
    while is_supervised():
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
