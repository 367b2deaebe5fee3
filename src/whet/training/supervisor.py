"""The parent process of a training: forwards signals and restarts it after a kill. Imports no torch."""

import contextlib
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from whet.base import env
from whet.base.errors import WhetError
from whet.plan.plan import read_plan, with_smaller_micro_batch
from whet.run import lock
from whet.run.event import SESSION_START_KINDS
from whet.run.events import EventLog, History
from whet.run.folder import RUN_FILE, open_run, rewrite_parts

VARIABLE = "WHET_SUPERVISOR"
"""In a supervised process: the parent's id and the descriptor on which the parent is told of the run folder."""

EARLY_KILL_STEPS = 20
"""A training that was killed before it made so many steps is taken to need less memory."""

_MESSAGE_BYTES = 8_192
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class KilledError(WhetError):
    """A training that was killed and is not started again."""

    def __init__(self, what: str, *, got: str, try_: str, code: int) -> None:
        super().__init__(what, got=got, try_=try_)
        self.exit_code = 128 - code if code < 0 else code


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingExit:
    """One training process, ended."""

    code: int
    """Its exit code; minus the signal that killed it."""
    run: Path | None
    """The run folder it said it trains in."""
    step: int = 0
    """The last step it told of, half a second old at most."""
    was_asked_to_stop: bool
    was_measured: bool
    """Whether it was still finding out what is fastest when it ended."""

    @property
    def killer(self) -> str:
        """The signal that killed it, by name."""
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"


def is_supervised() -> bool:
    """Whether a parent watches over this process."""
    return _parent_pid() == os.getppid()


def is_orphan() -> bool:
    """Whether the parent that should watch over this process is gone; a whet inside a training is no orphan."""
    parent = _parent_pid()
    if parent is None or parent == os.getppid():
        return False
    try:
        os.kill(parent, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _parent_pid() -> int | None:
    said = env.read(VARIABLE)
    return None if said is None else int(said.partition(":")[0])


def report_to_parent(run: Path | None, *, step: int = 0) -> None:
    """Names the run folder and the step to the parent, if there is one; None while the training is only measured."""
    if is_supervised():
        descriptor = int((env.read(VARIABLE) or "").partition(":")[2])
        note = json.dumps({"run": None if run is None else str(run), "step": step}).encode()
        with contextlib.suppress(OSError):
            # Over the last one: a pipe would be full one day, and hold the training up.
            os.pwrite(descriptor, note.ljust(_MESSAGE_BYTES), 0)


def supervise(command: Callable[[Path | None], Sequence[str]], *, max_restarts: int, say: Callable[[str], None]) -> int:
    """Runs a training until it ends by itself; its exit code.

    `command` makes the words of whet: for None the first time, for the run folder when it is to go on.
    """
    words, num_restarts = command(None), 0
    while True:
        life = _run_child(words)
        if life.code >= 0:
            return life.code
        if life.was_asked_to_stop:
            return 128 - life.code
        if life.was_measured:
            # The run has not begun, so nothing is lost; it can do without.
            say(f"the training was killed by {life.killer} while it was measured; it starts without")
            words = [*command(None), "--no-measure"]
            continue
        if life.run is None:
            raise KilledError(
                "the training was killed before it began",
                got=life.killer,
                try_="the same command again",
                code=life.code,
            )
        words = command(life.run)
        if num_restarts == max_restarts:
            raise KilledError(
                "the training was killed, and is not started again",
                got=f"{life.killer}, after {num_restarts} restarts; --max-restarts allows no more",
                try_=f"to go on: {shlex.join(['whet', *words])}",
                code=life.code,
            )
        num_restarts += 1
        said = prepare_restart(life.run, killer=life.killer, is_first=num_restarts == 1, told_step=life.step)
        say(f"the training was killed by {life.killer}; {said}")


def prepare_restart(run: Path, *, killer: str, is_first: bool, told_step: int = 0) -> str:
    """Prepares a run whose process was killed to go on, and writes down that it was; what was done, in words.

    `told_step` is the last one the process told of: its events reach the disk a little later.
    """
    if not (run / RUN_FILE).exists():
        # A folder of many trainings; each part of it goes on from what is whole.
        return "it goes on"
    opened = open_run(run)
    history = History(opened)
    began = next((event.step for event in history.backwards(kinds=SESSION_START_KINDS)), 0)
    reached = max((event.step for event in _sitting(history) if event.kind == "step"), default=began)
    reached = max(reached, told_step)
    has_pressure = any(e.kind == "pressure" and e.get("level") != "normal" for e in _sitting(history))
    plan = read_plan(opened.plan, where=f"{run}/plan.json")
    micro = plan.micro_batch
    assert isinstance(micro, int)
    less, cure = None, "it goes on with the same plan"
    # Only SIGKILL is how systems answer a lack of memory; a crash has other reasons.
    if killer == "SIGKILL" and (has_pressure or not (is_first or reached - began >= EARLY_KILL_STEPS)):
        why = "after memory pressure" if has_pressure else f"again, with fewer than {EARLY_KILL_STEPS} steps made"
        half = max(1, micro // 2)
        if "micro_batch" in plan.overrides:
            cure = f"{why}; micro_batch={micro} is your word and stays: micro_batch={half} in a new run may help"
        elif micro == 1 or plan.workload.has_batchnorm:
            cure = f"{why}; the micro-batch cannot be smaller, so it goes on with the same plan"
        else:
            reason = f"micro batch {micro} was killed {why}"
            less = with_smaller_micro_batch(plan, half, reason=reason, problem=killer)
            cure = f"{why}, so it goes on with micro batch {less.micro_batch} instead of {micro}"
    with lock.acquire(run), EventLog(opened) as log:
        if less is not None:
            rewrite_parts(opened, plan=less.as_json())
        exact = {} if less is None else {"exact": False}
        log.append("restart", step=reached, reason=f"killed by {killer}", action=cure, **exact)
    return cure


def _sitting(history: History) -> Iterator[Any]:
    """The events of the newest sitting, the newest first."""
    for event in history.backwards():
        if event.kind in SESSION_START_KINDS:
            return
        yield event


def _run_child(words: Sequence[str]) -> TrainingExit:
    with tempfile.TemporaryFile() as notes:
        mark = f"{os.getpid()}:{notes.fileno()}"
        # -P: as for the program `whet` itself, the folder we are in is not searched for modules.
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "whet", *words],
            env=env.child_environment(**{VARIABLE: mark}),
            pass_fds=(notes.fileno(),),
        )
        with _forward_signals(child) as asked:
            code = child.wait()
        note = os.pread(notes.fileno(), _MESSAGE_BYTES, 0)
    told: dict[str, Any] = json.loads(note) if note else {"run": None, "step": 0}
    run = None if told["run"] is None else Path(told["run"])
    return TrainingExit(
        code=code,
        run=run,
        step=told["step"],
        was_asked_to_stop=bool(asked),
        was_measured=bool(note) and run is None,
    )


@contextlib.contextmanager
def _forward_signals(child: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """While entered, signals that ask to stop go to the child; the list holds those that came."""
    asked: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    # What is ignored, as SIGHUP is under nohup, stays ignored here and in the child.
    heard = [number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in heard}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_with_parent() -> None:
    """Ends this process when its parent is killed: who kills whet means the training too."""
    if not is_supervised():
        return
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    threading.Thread(target=_poll_parent, daemon=True, name="parent").start()


def _poll_parent() -> None:
    """Where the system does not do it: the training is asked to stop, and saves."""
    while is_supervised():
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
