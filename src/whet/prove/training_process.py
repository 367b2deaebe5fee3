"""The child processes of a proof: a training process that counts its disk calls, and the fork server.

This module does not import torch itself. A training process writes its messages to a file, because they must survive a
SIGKILL, and a forked process has no pipe to the parent.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from whet.base.errors import WhetError
from whet.base.model import FrozenModel
from whet.base.origin import code_origin, frame_name, user_frames
from whet.base.process import kill_with_parent
from whet.base.worker import WorkerChannel, error_to_json, exit_now, load_object
from whet.run import durable
from whet.run.disk import Disk
from whet.run.folder import CHECKPOINTS

# All public methods of Disk, so that a new method is counted without a change here.
DISK_CALLS = tuple(name for name in vars(Disk) if not name.startswith("_"))

# This many disk calls after its folder was created, a checkpoint has its first file, but no manifest.
_CALLS_INTO_DRAFT = 4
_POLL_SECONDS = 0.002


class ProcessOrder(FrozenModel):
    """The instructions for a training process: what to run, and when to kill itself."""

    target: str
    """The training function as "module:function". It is called with the run folder, the arguments and `on_event`."""
    arguments: dict[str, Any]
    run: Path
    messages: Path
    """The file for messages, one JSON object per line."""
    output: Path
    """The file for stdout and stderr."""
    die_at: int = 0
    """The disk call, counted from 1, before which the process is killed; 0 for none."""
    die_after: bool = False
    """Whether the process is killed after that call instead."""
    die_in_draft: int = 0
    """The checkpoint, counted from 1, during which the process is killed; 0 for none."""


class TrainFunction(Protocol):
    """A function that starts a training run in a folder, or resumes it."""

    def __call__(self, run: Path, arguments: dict[str, Any], *, on_event: Any) -> None: ...


class CountingDisk(Disk):
    """Counts disk calls, and kills the process with SIGKILL at one of them.

    The process dies before or after call number `die_at`, or in the middle of writing checkpoint number `die_in_draft`.
    `log` is called at the start of every checkpoint, and before the kill.
    """

    def __init__(
        self, *, log: Callable[..., None], die_at: int = 0, die_after: bool = False, die_in_draft: int = 0
    ) -> None:
        self.count = 0
        self._num_drafts = 0
        self._log, self._die_at, self._die_after, self._die_in_draft = log, die_at, die_after, die_in_draft
        self._lock = threading.Lock()

    def _call(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        # Several threads may make calls, and each call needs a unique number.
        with self._lock:
            self.count += 1
            number = self.count
        # A new folder in checkpoints/ is the start of a checkpoint.
        if name == "make_folder" and arguments[0].parent.name == CHECKPOINTS:
            self._log("draft", call=number)
            self._num_drafts += 1
            if self._num_drafts == self._die_in_draft:
                self._die_at = number + _CALLS_INTO_DRAFT
        if number != self._die_at:
            return call(self, *arguments)
        self._log("last call", call=number, name=name)
        if self._die_after:
            call(self, *arguments)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("the process survived its SIGKILL")


def _counted(name: str) -> Callable[..., Any]:
    call = getattr(Disk, name)
    return lambda self, *arguments: self._call(name, call, *arguments)


for _name in DISK_CALLS:
    setattr(CountingDisk, _name, _counted(_name))


def run_order(_channel: WorkerChannel, order: dict[str, Any]) -> int:
    """Run an order in a new process of ProcessLauncher. Return the exit code."""
    return run_training(ProcessOrder.model_validate(order))


def run_training(order: ProcessOrder) -> int:
    """Train as specified by a ProcessOrder. Return the exit code."""
    output = os.open(order.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    # Redirect the file descriptors instead of sys.stdout, so that output of C libraries is captured too.
    for standard, descriptor in ((0, nothing), (1, output), (2, output)):
        os.dup2(descriptor, standard)
    messages = os.open(order.messages, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def log(kind: str, **fields: Any) -> None:
        os.write(messages, json.dumps({"kind": kind, "time": time.monotonic(), **fields}).encode() + b"\n")

    def on_event(kind: str, fields: dict[str, Any]) -> None:
        if kind in ("start", "resume"):
            log("ready", step=fields["step"], exactness=fields.get("exactness"))
        elif kind == "variables":
            log("variables", **fields)

    disk = CountingDisk(log=log, die_at=order.die_at, die_after=order.die_after, die_in_draft=order.die_in_draft)
    # All durable writes of this process go through the counting disk from here on.
    durable.disk = disk
    log("begin")
    try:
        train: TrainFunction = load_object(order.target)
        train(order.run, order.arguments, on_event=on_event)
    except Exception as error:
        traceback.print_exc()
        log("failed", **_describe(error))
        return 1
    log("end", calls=disk.count)
    return 0


def _describe(error: Exception) -> dict[str, Any]:
    """Return the error as JSON, with the last line of user code in its traceback."""
    if isinstance(error, WhetError):
        return error_to_json(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if code_origin(frame.filename) != "whet"]
    frames = user_frames(error) or frames
    where = f" ({frame_name(frames[-1])})" if frames else ""
    got = f"{type(error).__name__}: {error}{where}"[:500]
    return {"what": "training fails even without kills", "got": got, "try_": None, "is_usage": False}


# --- Fork server -----------------------------------------------------------------------------------------------------


def serve_forks(channel: WorkerChannel, _arguments: dict[str, Any]) -> int:
    """Import torch and other libraries once, and start each training process as a fork.

    User code is not imported here but in each fork, because a proof must fail if importing it is not deterministic.
    """
    for request in channel.messages():
        if "load" in request:
            channel.send({"threads": _import_libraries(**request["load"])})
        elif "start" in request:
            channel.send({"pid": _fork(channel, ProcessOrder.model_validate(request["start"]))})
        else:
            channel.send({"code": _wait(channel, **request["wait"])})
    return 0


def _import_libraries(target: str, arguments: dict[str, Any]) -> int:
    """Import the libraries of a training run. Return the number of threads: only a single-threaded process may fork.

    A child process imports the user's code and reports which libraries it needs, so that user code does not run here.
    """
    importlib.import_module(target.partition(":")[0])
    # Import this now. Otherwise the first optimizer of every fork would import it.
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._dynamo")
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _report_libraries(target, arguments, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as report:
        names = report.read().decode().split()
    os.waitpid(child, 0)
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    # Exclude these permanent objects from garbage collection, which would copy their memory pages in every fork.
    gc.freeze()
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0


def _report_libraries(target: str, arguments: dict[str, Any], writing: int) -> None:
    """Write the names of the libraries that `preload` imports to a pipe, and exit."""
    before = set(sys.modules)
    with contextlib.suppress(Exception):
        preload = getattr(importlib.import_module(target.partition(":")[0]), "preload", None)
        if preload is not None:
            preload(arguments)
    names = [name for name in sys.modules if name not in before and _is_library(name)]
    # Write at most the capacity of a pipe, so that the write cannot block.
    os.write(writing, " ".join(names).encode()[:65_536])
    # Skip the exit handlers, which belong to the parent process.
    os._exit(0)


def _is_library(name: str) -> bool:
    file = getattr(sys.modules[name], "__file__", None)
    return isinstance(file, str) and code_origin(file) != "you" and name != "__mp_main__"


def _fork(channel: WorkerChannel, order: ProcessOrder) -> int:
    """Fork a process that runs a ProcessOrder. Return its process id."""
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            # Set the process group in the parent as well, because either process may run first.
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        channel.close()
        # Make the fork the leader of its own process group, as any worker, and let it die with the fork server.
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        kill_with_parent()
        code = run_training(order)
    finally:
        exit_now(code)
    raise AssertionError("unreachable")


def _wait(channel: WorkerChannel, pid: int, seconds: float) -> int | None:
    """Return the exit code of a fork (negative signal number if killed). Kill it and return None after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and channel.has_parent():
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL_SECONDS)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None
