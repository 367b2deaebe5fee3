"""The training processes of a proof: one training with a counting disk, and the fork server."""

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

from whet.base.errors import UsageError, WhetError
from whet.base.model import FrozenModel
from whet.run import durable
from whet.run.disk import Disk
from whet.run.folder import CHECKPOINTS

DISK_CALLS = tuple(name for name in vars(Disk) if not name.startswith("_"))
"""Every call of the table; a new one is counted without a change here."""

_INTO_DRAFT = 4
"""Calls: its first file is there then, and no manifest."""

LogCall = Callable[..., None]


class CountingDisk(Disk):
    """Counts every call from 1. At call `die_at` the process is killed with SIGKILL: before the call, or after it; or
    in the middle of the draft of a checkpoint, of the one with the number `die_in_draft`.

    `tell` hears of the begin of every draft, and of the end.
    """

    def __init__(self, *, tell: LogCall, die_at: int = 0, die_after: bool = False, die_in_draft: int = 0) -> None:
        self.count = 0
        self._num_drafts = 0
        self._tell, self._die_at, self._die_after, self._die_in_draft = tell, die_at, die_after, die_in_draft
        self._lock = threading.Lock()

    def _counted(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        with self._lock:
            self.count += 1
            number = self.count
        if name == "make_folder" and arguments[0].parent.name == CHECKPOINTS:
            self._tell("draft", call=number)
            self._num_drafts += 1
            if self._num_drafts == self._die_in_draft:
                self._die_at = number + _INTO_DRAFT
        if number != self._die_at:
            return call(self, *arguments)
        self._tell("last call", call=number, name=name)
        if self._die_after:
            call(self, *arguments)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a process outlives its SIGKILL")


def _counting(name: str) -> Callable[..., Any]:
    call = getattr(Disk, name)
    return lambda self, *arguments: self._counted(name, call, *arguments)


for _name in DISK_CALLS:
    setattr(CountingDisk, _name, _counting(_name))


class ProcessOrder(FrozenModel):
    """What a life is to do, and where it tells of it."""

    target: str
    """The training as module:function, called with the run folder, the arguments and `show`."""
    arguments: dict[str, Any]
    run: Path
    diary: Path
    """What it tells, a JSON line at a time."""
    errors: Path
    """What it prints."""
    die_at: int = 0
    """The disk call that is its last; 0 for none."""
    die_after: bool = False
    die_in_draft: int = 0
    """The checkpoint, counted from 1, in the middle of whose writing it ends; 0 for none."""


class TrainFunction(Protocol):
    """A training that can be proved: begins in a run folder or goes on there; `arguments` hold what was ordered."""

    def __call__(self, run: Path, arguments: dict[str, Any], *, show: Any) -> None: ...


def load_train_function(target: str) -> TrainFunction:
    """The function at module:function."""
    module, _, name = target.partition(":")
    found: TrainFunction = getattr(importlib.import_module(module), name)
    return found


def run_training(order: ProcessOrder) -> int:
    """Trains as ordered; the exit code. What it prints goes to a file, and all it has to say into its diary."""
    errors = os.open(order.errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for standard, descriptor in ((0, nothing), (1, errors), (2, errors)):
        os.dup2(descriptor, standard)
    diary = os.open(order.diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def tell(word: str, **fields: Any) -> None:
        os.write(diary, json.dumps({"word": word, "time": time.monotonic(), **fields}).encode() + b"\n")

    def show(kind: str, fields: dict[str, Any]) -> None:
        if kind in ("start", "resume"):
            tell("ready", step=fields["step"], exactness=fields.get("exactness"))

    disk = CountingDisk(tell=tell, die_at=order.die_at, die_after=order.die_after, die_in_draft=order.die_in_draft)
    durable.disk = disk
    tell("begin")
    try:
        load_train_function(order.target)(order.run, order.arguments, show=show)
    except Exception as error:
        traceback.print_exc()
        tell("failed", **_told(error))
        return 1
    tell("end", calls=disk.count)
    return 0


def _told(error: Exception) -> dict[str, Any]:
    if isinstance(error, WhetError):
        return {"what": error.what, "got": error.got, "try_": error.try_, "is_usage": isinstance(error, UsageError)}
    ours = str(Path(__file__).parent.parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    theirs = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    where = f" ({Path(theirs[-1].filename).name}:{theirs[-1].lineno} in {theirs[-1].name}())" if theirs else ""
    return {"what": "the training fails by itself", "got": f"{type(error).__name__}: {error}{where}"[:500]}


def isolate() -> None:
    """A group of its own, so that Ctrl-C at the terminal is not for it; and its parent's death is its own, on Linux."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    isolate()
    code = run_training(ProcessOrder.model_validate_json(sys.stdin.read()))
    sys.stdout.flush()
    # Without the usual way out: a driver that was upset may hang there.
    os._exit(code)


LIBRARIES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib"))


def serve_forks() -> None:
    """Answers until its standard input ends."""
    answers = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        if "load" in request:
            answer: dict[str, Any] = {"threads": _load(**request["load"])}
        elif "live" in request:
            answer = {"pid": _fork(ProcessOrder.model_validate(request["live"]))}
        else:
            answer = {"code": _wait(**request["wait"])}
        os.write(answers, json.dumps(answer).encode() + b"\n")


def _load(target: str, arguments: dict[str, Any]) -> int:
    """Imports what the training will import; how many threads this process has now: more than one and it cannot fork.

    Which libraries those are is found out by a child, so that none of the training's own code runs here.
    """
    importlib.import_module(target.partition(":")[0])
    # The first optimizer imports a great deal of torch.
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._dynamo")
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _rehearse(target, arguments, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        names = told.read().decode().split()
    os.waitpid(child, 0)
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    # Its objects stay for good: no child looks at them when it collects.
    gc.freeze()
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0


def _rehearse(target: str, arguments: dict[str, Any], writing: int) -> None:
    before = set(sys.modules)
    with contextlib.suppress(Exception):
        rehearse = getattr(importlib.import_module(target.partition(":")[0]), "rehearse", None)
        if rehearse is not None:
            rehearse(arguments)
    names = [name for name in sys.modules if name not in before and _is_library(name)]
    os.write(writing, " ".join(names).encode()[:65_536])
    os._exit(0)


def _is_library(name: str) -> bool:
    file = getattr(sys.modules[name], "__file__", None)
    return isinstance(file, str) and file.startswith(LIBRARIES) and name != "__mp_main__"


def _fork(order: ProcessOrder) -> int:
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        isolate()
        code = run_training(order)
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(pid: int, seconds: float) -> int | None:
    """The exit code of a life, minus the signal that killed it; None, and the life is ended, when it takes longer."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


if __name__ == "__main__":
    serve_forks()
