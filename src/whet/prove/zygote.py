"""The parent of many lives: loads torch and the training's libraries once, and each life is a fork of it.

It reads one JSON request a line and answers each with one line. The training's own code is loaded by each life anew:
what it draws or reads while it is loaded must come out the same in every process, or the proof must fail.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from whet.prove.life import Order, alone, live

LIBRARIES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib"))


def main() -> None:
    """Answers until its standard input ends."""
    answers = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        if "load" in request:
            answer: dict[str, Any] = {"threads": _load(**request["load"])}
        elif "live" in request:
            answer = {"pid": _fork(Order.model_validate(request["live"]))}
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


def _fork(order: Order) -> int:
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        alone()
        code = live(order)
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
    main()
