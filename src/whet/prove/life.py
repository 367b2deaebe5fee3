"""One life of a training: what runs in a process that may be killed at any instant. No torch before the training's own.

As a program it reads its order from standard input, and lives it.
"""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Protocol

from whet.base.errors import UsageError, WhetError
from whet.base.record import Record
from whet.prove.disk import CountingDisk
from whet.run import durable


class Order(Record):
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


class Train(Protocol):
    """A training that can be proved: begins in a run folder or goes on there; `arguments` hold what was ordered."""

    def __call__(self, run: Path, arguments: dict[str, Any], *, show: Any) -> None: ...


def find(target: str) -> Train:
    """The function at module:function."""
    module, _, name = target.partition(":")
    found: Train = getattr(importlib.import_module(module), name)
    return found


def live(order: Order) -> int:
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
        find(order.target)(order.run, order.arguments, show=show)
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


def alone() -> None:
    """A group of its own, so that Ctrl-C at the terminal is not for it; and its parent's death is its own, on Linux."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    alone()
    code = live(Order.model_validate_json(sys.stdin.read()))
    sys.stdout.flush()
    # Without the usual way out: a driver that was upset may hang there.
    os._exit(code)
