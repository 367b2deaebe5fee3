"""Python programs in separate processes, forked from one that has imported torch.

`run("-m", "whet", "train", ...)` is like `subprocess.run([sys.executable, "-m", "whet", "train", ...])`, but takes
milliseconds instead of seconds. Tests of imports and of the start of a program must start a real process.
"""

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import ModuleType

from fork_server import TIMEOUT_SECONDS, ForkedProcess, ForkServer


class Program:
    """A started Python process."""

    def __init__(self, words: list[str], life: ForkedProcess, out: Path) -> None:
        self.pid = life.pid
        self.send_signal = life.send
        self._words, self._life, self._out = words, life, out

    def wait(self, *, timeout: float = TIMEOUT_SECONDS) -> subprocess.CompletedProcess[str]:
        code, errors = self._life.wait(seconds=timeout)
        return subprocess.CompletedProcess(self._words, code, self._out.read_text(), errors)


class WarmPython:
    """Start `python WORDS`. Of Python's own options, -m, -c, a file, -P and -W are supported."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server

    def start(self, *words: object, cwd: Path, env: dict[str, str] | None = None) -> Program:
        out = self._fork_server.new_file("out")
        reported = [str(word) for word in words]
        asked = {"words": reported, "cwd": str(cwd), "env": dict(os.environ) if env is None else env, "out": str(out)}
        return Program(reported, self._fork_server.start(Path(__file__), json.dumps(asked)), out)

    def run(
        self, *words: object, cwd: Path, env: dict[str, str] | None = None, timeout: float = TIMEOUT_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        return self.start(*words, cwd=cwd, env=env).wait(timeout=timeout)


# --- in the fork -----------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    asked = json.loads(arguments[0])
    # Otherwise the fork would read the requests of its parent.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(asked["out"], os.O_WRONLY), 1)
    os.chdir(asked["cwd"])
    _become(asked["env"])
    code = _run(asked["words"])
    sys.stdout.flush()
    return code


def _become(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    for folder in reversed(environment.get("PYTHONPATH", "").split(os.pathsep)):
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)


def _run(words: list[str]) -> int:
    code = 0
    try:
        _execute(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    # Run the usual exit handlers of an interpreter.
    threading._shutdown()
    atexit._run_exitfuncs()
    return code


def _execute(words: list[str]) -> None:
    is_safe = False
    while words[0] in ("-P", "-W"):
        if words[0] == "-P":
            is_safe = True
        else:
            warnings.simplefilter(words.pop(1))  # type: ignore[arg-type]
        words = words[1:]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0:0] = [] if is_safe else [str(Path.cwd())]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[0:0] = [] if is_safe else [""]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = list(words)
        sys.path[0:0] = [] if is_safe else [str(Path(words[0]).resolve().parent)]
        runpy.run_path(words[0], run_name="__main__")
