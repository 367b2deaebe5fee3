"""The training processes of a proof: one training run with a counting disk, and the fork server. Runs in children.

Nothing here imports torch before the training does. A training process writes its messages to a file, because they must
survive a SIGKILL and a fork has no pipe.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from whet.base.errors import WhetError
from whet.base.model import FrozenModel
from whet.base.worker import WorkerChannel, error_to_json, exit_now, load_object
from whet.run import durable
from whet.run.disk import Disk
from whet.run.folder import CHECKPOINTS

# List every method of Disk, so that new methods are counted without a change here.
DISK_CALLS = tuple(name for name in vars(Disk) if not name.startswith("_"))

# After this many disk calls, the first file of a checkpoint exists and its manifest does not.
_CALLS_INTO_DRAFT = 4
_POLL_SECONDS = 0.002
_LIBRARY_PATHS = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib"))


class ProcessOrder(FrozenModel):
    """The instructions for a training process."""

    target: str
    """The training run as "module:function", called with the run folder, the arguments and `on_event`."""
    arguments: dict[str, Any]
    run: Path
    messages: Path
    """The file for messages, one JSON line each."""
    output: Path
    """The file for stdout and stderr."""
    die_at: int = 0
    """The disk call at which the process is killed; 0 for none."""
    die_after: bool = False
    die_in_draft: int = 0
    """The checkpoint, counted from 1, during which the process is killed; 0 for none."""


class TrainFunction(Protocol):
    """A training run that can be proved: it starts in a run folder or resumes from it."""

    def __call__(self, run: Path, arguments: dict[str, Any], *, on_event: Any) -> None: ...


class CountingDisk(Disk):
    """Counts disk calls from 1, and kills the process with SIGKILL at one of them.

    The kill happens before or after the call `die_at`, or in the middle of writing checkpoint number `die_in_draft`.
    `log` is called at the start of every checkpoint and at the last call.
    """

    def __init__(
        self, *, log: Callable[..., None], die_at: int = 0, die_after: bool = False, die_in_draft: int = 0
    ) -> None:
        self.count = 0
        self._num_drafts = 0
        self._log, self._die_at, self._die_after, self._die_in_draft = log, die_at, die_after, die_in_draft
        self._lock = threading.Lock()

    def _call(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        # Calls may come from several threads, and each needs a unique number.
        with self._lock:
            self.count += 1
            number = self.count
        # A new folder below checkpoints/ is the start of a checkpoint.
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
    """Train once in a separate process; return the exit code."""
    return run_training(ProcessOrder.model_validate(order))


def run_training(order: ProcessOrder) -> int:
    """Train as an order says; return the exit code."""
    output = os.open(order.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    # Redirect the descriptors, not sys.stdout, so that output of C libraries is captured too.
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
    """Return the error with the last line of user code in its traceback."""
    if isinstance(error, WhetError):
        return error_to_json(error)
    ours = str(Path(__file__).parent.parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    theirs = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    where = f" ({Path(theirs[-1].filename).name}:{theirs[-1].lineno} in {theirs[-1].name}())" if theirs else ""
    got = f"{type(error).__name__}: {error}{where}"[:500]
    return {"what": "the training fails even without kills", "got": got, "try_": None, "is_usage": False}


# --- Fork server -----------------------------------------------------------------------------------------------------


def serve_forks(channel: WorkerChannel, _arguments: dict[str, Any]) -> int:
    """Import torch and the libraries once, and start each training run as a fork.

    Each fork imports the training run's module again: whatever the module draws or reads at import must be the same in
    every process, or the proof must fail.
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
    """Import the libraries of the training run; return the number of threads, because only one may fork.

    A child process determines the list of libraries, so that no code of the training runs here.
    """
    importlib.import_module(target.partition(":")[0])
    # Import it now; otherwise the first optimizer would import it in every fork.
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
    # Freeze these permanent objects: a garbage collection in a fork would otherwise copy their pages.
    gc.freeze()
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0


def _report_libraries(target: str, arguments: dict[str, Any], writing: int) -> None:
    before = set(sys.modules)
    with contextlib.suppress(Exception):
        preload = getattr(importlib.import_module(target.partition(":")[0]), "preload", None)
        if preload is not None:
            preload(arguments)
    names = [name for name in sys.modules if name not in before and _is_library(name)]
    # At most the capacity of a pipe, so that the write cannot block.
    os.write(writing, " ".join(names).encode()[:65_536])
    # Skip exit handlers, which belong to the parent process.
    os._exit(0)


def _is_library(name: str) -> bool:
    file = getattr(sys.modules[name], "__file__", None)
    return isinstance(file, str) and file.startswith(_LIBRARY_PATHS) and name != "__mp_main__"


def _fork(channel: WorkerChannel, order: ProcessOrder) -> int:
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            # Set the group in the parent as well: either process may run first.
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        channel.close()
        # Make the fork a group leader, like any worker, and let it die with the fork server.
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        if sys.platform == "linux":
            set_parent_death_signal = 1
            ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        code = run_training(order)
    finally:
        exit_now(code)
    raise AssertionError("unreachable")


def _wait(channel: WorkerChannel, pid: int, seconds: float) -> int | None:
    """Return the exit code of a fork, or minus the signal that killed it. Kill it and return None after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and channel.has_parent():
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL_SECONDS)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None
