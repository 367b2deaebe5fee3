"""Many short-lived training processes for tests: torch is imported once, and each process is a fork.

`import torch` costs seconds; a fork costs milliseconds. The parent never starts threads before it forks.
As a program this is the parent: it reads one JSON request per line and answers each with one line.
"""

import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

TIMEOUT_SECONDS = 600
"""Timeout for processes that end by themselves on a busy machine; only a hang takes this long."""


class ProcessExit(NamedTuple):
    code: int
    """The exit code; minus the signal for a process that was killed."""
    errors: str


class ForkedProcess:
    """One process."""

    def __init__(self, fork_server: "ForkServer", pid: int, errors: Path) -> None:
        self.pid = pid
        self._fork_server = fork_server
        self._errors = errors
        self._exit: ProcessExit | None = None

    def send(self, number: int) -> None:
        # Once its end is known, its pid may belong to another process.
        if self._exit is None:
            os.kill(self.pid, number)

    def poll(self, *, seconds: float = 0) -> ProcessExit | None:
        """Return how the process ended; None if it is still running after `seconds`."""
        if self._exit is None:
            answer = self._fork_server.send({"wait": self.pid, "seconds": seconds})
            if answer["code"] is not None:
                self._exit = ProcessExit(answer["code"], self._errors.read_text())
        return self._exit

    def wait(self, *, seconds: float = TIMEOUT_SECONDS) -> ProcessExit:
        ended = self.poll(seconds=seconds)
        assert ended is not None, f"the process did not end in {seconds} s: {self._errors.read_text()}"
        return ended


class ForkServer:
    """Starts `main(arguments)` of Python files as separate processes."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._count = 0
        self._parent = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def new_file(self, ending: str) -> Path:
        """Create an empty file here, because the process may be killed before it could."""
        self._count += 1
        file = Path(self._folder.name) / f"{self._count}.{ending}"
        file.touch()
        return file

    def start(self, file: Path, *arguments: object) -> ForkedProcess:
        errors = self.new_file("errors")
        words = [str(argument) for argument in arguments]
        answer = self.send({"file": str(file), "arguments": words, "errors": str(errors)})
        return ForkedProcess(self, answer["pid"], errors)

    def send(self, request: dict) -> dict:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(json.dumps(request) + "\n")
        self._parent.stdin.flush()
        return json.loads(self._parent.stdout.readline())

    def close(self) -> None:
        self._parent.communicate(timeout=TIMEOUT_SECONDS)
        self._folder.cleanup()


def _serve() -> None:
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    import torch._subclasses.fake_tensor
    import torch.profiler

    import whet
    import whet.api.verify
    import whet.cli.main
    import whet.recipes.text.recipe

    for name in whet.__all__:
        getattr(whet, name)
    # The first optimizer imports a great deal of torch.
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)
    # Its objects are permanent, so exclude them from garbage collection in children.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"code": _wait(request)} if "wait" in request else {"pid": _fork(request)}
        print(json.dumps(answer), flush=True)


def _fork(request: dict) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        errors = os.open(request["errors"], os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        spec = importlib.util.spec_from_file_location("job", request["file"])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # As for a module that is imported: its classes are found by their names.
        sys.modules["job"] = module
        spec.loader.exec_module(module)
        code = module.main(request["arguments"])
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(request: dict) -> int | None:
    deadline = time.monotonic() + request["seconds"]
    while True:
        pid, status = os.waitpid(request["wait"], os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.005)


if __name__ == "__main__":
    _serve()
