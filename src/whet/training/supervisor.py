"""The parent of the training process, which forwards signals and restarts it after a kill. Does not import torch.

macOS and Linux kill a process with SIGKILL when memory runs out. A killed run resumes with the same plan. If it is soon
killed again, or was killed after memory pressure, it resumes with half the micro-batch, and the log records the step
from which it is no longer bit-exact.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from whet.base import env
from whet.base.errors import WhetError
from whet.base.process import kill_with_parent, signal_name, watch_parent
from whet.plan.plan import read_plan, with_smaller_micro_batch
from whet.run import lock
from whet.run.event import SESSION_START_KINDS
from whet.run.events import EventLog, History
from whet.run.folder import RUN_FILE, open_run, rewrite_parts

VARIABLE = "WHET_SUPERVISOR"
"""Environment variable of a supervised process: the parent's pid and the file descriptor for reports to it."""

EARLY_KILL_STEPS = 20
"""A run that is killed again within this many steps resumes with a smaller micro-batch."""

# Every report has this size, so that it completely overwrites the previous one.
_MESSAGE_BYTES = 8_192
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class KilledError(WhetError):
    """Raised if a training run was killed and is not restarted."""

    def __init__(self, what: str, *, got: str, try_: str, code: int) -> None:
        super().__init__(what, got=got, try_=try_)
        self.exit_code = 128 - code if code < 0 else code


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingExit:
    """The exit code of a training process, with the run folder and the step that it reported."""

    code: int
    """The exit code, or the negative signal number if a signal killed the process."""
    run: Path | None
    """The run folder that the process reported; None if it reported none."""
    step: int = 0
    """The last step that the process reported, at most half a second old."""
    was_stop_requested: bool
    was_measured: bool
    """Whether the process was still measuring plans."""

    @property
    def killer(self) -> str:
        """The name of the signal that killed the process."""
        return signal_name(-self.code)


def is_supervised() -> bool:
    """Return whether the parent of this process is a supervisor."""
    return _parent_pid() == os.getppid()


def is_orphan() -> bool:
    """Return whether this process was started by a supervisor that has died.

    A whet process that a training run has started is not an orphan.
    """
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
    value = env.read(VARIABLE)
    return None if value is None else int(value.partition(":")[0])


def report_to_parent(run: Path | None, *, step: int = 0) -> None:
    """Report the run folder and the step to the supervisor, if any. `run` is None while plans are being measured."""
    if is_supervised():
        descriptor = int((env.read(VARIABLE) or "").partition(":")[2])
        message = json.dumps({"run": None if run is None else str(run), "step": step}).encode()
        with contextlib.suppress(OSError):
            # Overwrite the last message in a file. A pipe that the parent does not read would fill up and block.
            os.pwrite(descriptor, message.ljust(_MESSAGE_BYTES), 0)


def supervise(
    command: Callable[[Path | None], Sequence[str]], *, max_restarts: int, notify: Callable[[str], None]
) -> int:
    """Run a training command until it exits without being killed, and return its exit code.

    `command` returns the arguments for whet. It is called with None to start a run and with a run folder to resume one.
    """
    arguments, num_restarts = command(None), 0
    while True:
        ended = _run_child(arguments)
        if ended.code >= 0:
            return ended.code
        if ended.was_stop_requested:
            return 128 - ended.code
        if ended.was_measured:
            # The run has not begun, so nothing is lost. Start it without measuring, which may have caused the kill.
            notify(f"the training process was killed by {ended.killer} during measuring; it restarts without measuring")
            arguments = [*command(None), "--no-measure"]
            continue
        if ended.run is None:
            raise KilledError(
                "the training process was killed before its first step",
                got=ended.killer,
                try_="the same command again",
                code=ended.code,
            )
        arguments = command(ended.run)
        if num_restarts == max_restarts:
            raise KilledError(
                "the training process was killed and is not restarted",
                got=f"{ended.killer}, after {num_restarts} restarts; --max-restarts allows no more",
                try_=f"to resume: {shlex.join(['whet', *arguments])}",
                code=ended.code,
            )
        num_restarts += 1
        action = prepare_restart(ended.run, killer=ended.killer, is_first=num_restarts == 1, reported_step=ended.step)
        notify(f"the training process was killed by {ended.killer}; {action}")


def prepare_restart(run: Path, *, killer: str, is_first: bool, reported_step: int = 0) -> str:
    """Prepare a killed run for a resume, log the kill and return a description of the change.

    `reported_step` is the last step that the process reported, which may be newer than the events on disk.
    """
    if not (run / RUN_FILE).exists():
        # The folder contains several runs, each of which resumes from its own checkpoint.
        return "it resumes"
    opened = open_run(run)
    history = History(opened)
    began = next((event.step for event in history.backwards(kinds=SESSION_START_KINDS)), 0)
    reached = max((event.step for event in _last_session(history) if event.kind == "step"), default=began)
    reached = max(reached, reported_step)
    has_pressure = any(e.kind == "pressure" and e.get("level") != "normal" for e in _last_session(history))
    plan = read_plan(opened.plan, where=f"{run}/plan.json")
    micro = plan.micro_batch
    assert isinstance(micro, int)
    smaller, action = None, "it resumes with the same plan"
    # The system sends SIGKILL when memory runs out. Other signals indicate crashes, which using less memory does not
    # fix.
    if killer == "SIGKILL" and (has_pressure or not (is_first or reached - began >= EARLY_KILL_STEPS)):
        why = "after memory pressure" if has_pressure else f"again, after fewer than {EARLY_KILL_STEPS} steps"
        half = max(1, micro // 2)
        if "micro_batch" in plan.overrides:
            action = f"{why}; micro_batch={micro} is your override and stays: micro_batch={half} in a new run may help"
        elif micro == 1 or plan.workload.whole_batch_reason is not None:
            action = f"{why}; the micro-batch cannot be smaller, so it resumes with the same plan"
        else:
            reason = f"micro-batch {micro} was killed {why}"
            smaller = with_smaller_micro_batch(plan, half, reason=reason, problem=killer)
            action = f"{why}, so it resumes with micro-batch {smaller.micro_batch} instead of {micro}"
    with lock.acquire(run), EventLog(opened) as log:
        if smaller is not None:
            rewrite_parts(opened, plan=smaller.as_json())
        exact = {} if smaller is None else {"exact": False}
        log.append("restart", step=reached, reason=f"killed by {killer}", action=action, **exact)
    return action


def _last_session(history: History) -> Iterator[Any]:
    """Yield the events of the last session, newest first."""
    for event in history.backwards():
        if event.kind in SESSION_START_KINDS:
            return
        yield event


def _run_child(arguments: Sequence[str]) -> TrainingExit:
    with tempfile.TemporaryFile() as reports:
        mark = f"{os.getpid()}:{reports.fileno()}"
        # -P: do not search the current folder for modules, as in the `whet` program.
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "whet", *arguments],
            env=env.child_environment(**{VARIABLE: mark}),
            pass_fds=(reports.fileno(),),
        )
        with _forward_signals(child) as received:
            code = child.wait()
        message = os.pread(reports.fileno(), _MESSAGE_BYTES, 0)
    report: dict[str, Any] = json.loads(message) if message else {"run": None, "step": 0}
    run = None if report["run"] is None else Path(report["run"])
    return TrainingExit(
        code=code,
        run=run,
        step=report["step"],
        was_stop_requested=bool(received),
        was_measured=bool(message) and run is None,
    )


@contextlib.contextmanager
def _forward_signals(child: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Forward stop signals to the child inside the `with` block. Yield a list that collects the received signals."""
    received: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    # Signals that are ignored, such as SIGHUP under nohup, remain ignored in this process and in the child.
    handled = [number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in handled}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_with_parent() -> None:
    """Exit when the supervisor is killed, so that killing `whet train` also ends the training process."""
    if not is_supervised():
        return
    kill_with_parent()
    # On systems without a parent-death signal, stop the run with a final save.
    watch_parent(os.getppid(), lambda: os.kill(os.getpid(), signal.SIGTERM))
