"""Starts training processes as forks of a warm process or as fresh ones, and kills them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from whet.base import env
from whet.prove.training_process import ProcessOrder

HASH_SEED = "PYTHONHASHSEED"


class TrainingProcess:
    """One process of a training."""

    def __init__(self, pid: int, order: ProcessOrder, wait: Callable[[float], int | None]) -> None:
        self.pid, self.order = pid, order
        self.began = time.monotonic()
        self.seconds = 0.0
        """How long it lasted, once it was waited for."""
        self._wait = wait

    def kill(self) -> None:
        """SIGKILL, now."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> int | None:
        """Its exit code, minus the signal that killed it; None for one that had to be ended after `seconds`."""
        code = self._wait(seconds)
        self.seconds = time.monotonic() - self.began
        # Workers of its own end by themselves, some seconds late.
        kill_group(self.pid)
        return code

    def told(self, word: str) -> list[dict[str, Any]]:
        """What it has told so far under that word."""
        lines = self.order.diary.read_bytes().split(b"\n")[:-1] if self.order.diary.exists() else []
        return [entry for entry in map(json.loads, lines) if entry["word"] == word]

    def wait_until(self, word: str, seconds: float, *, times: int = 1) -> bool:
        """Whether it has told that word so many times; False when it ended before, or has not after `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if len(self.told(word)) >= times:
                return True
            if self.told("failed") or self.told("end"):
                return False
            time.sleep(0.002)
        return False

    def ready_after(self) -> float:
        """Seconds from its birth until it began to train."""
        return next((float(entry["time"]) - self.began for entry in self.told("ready")), self.seconds)

    @property
    def resumed_from(self) -> int:
        """The step it went on from; 0 for one that began, or was killed before it knew."""
        return int(next((entry["step"] for entry in self.told("ready")), 0))

    def last_words(self) -> str:
        """Why it failed, as far as it said."""
        for entry in self.told("failed"):
            return f"{entry['what']}: {entry.get('got')}"
        printed = self.order.errors.read_text(errors="replace").strip() if self.order.errors.exists() else ""
        return printed.splitlines()[-1][:300] if printed else "it said nothing"


class Launcher(Protocol):
    """A way to start lives."""

    def start(self, order: ProcessOrder) -> TrainingProcess: ...


class ProcessLauncher:
    """Each life is a new Python; slower, and as real as it gets. A context manager that leaves no life behind."""

    def __init__(self, hash_seed: int) -> None:
        self._environment = env.child_environment(**hash_seeded(hash_seed))
        self._newest: subprocess.Popen[bytes] | None = None

    def start(self, order: ProcessOrder) -> TrainingProcess:
        """A new process that lives the order."""
        process = self._newest = subprocess.Popen(
            [sys.executable, "-m", "whet.prove.training_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._environment,
            process_group=0,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(order.model_dump_json().encode())

        def wait(seconds: float) -> int | None:
            try:
                return process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                return None

        return TrainingProcess(process.pid, order, wait)

    def __enter__(self) -> "ProcessLauncher":
        return self

    def __exit__(self, *_: object) -> None:
        if self._newest is not None and self._newest.poll() is None:
            kill_group(self._newest.pid)
            self._newest.wait()


class ForkLauncher:
    """Each life is a fork of a process that has loaded torch; Linux and the CPU only. A context manager."""

    def __init__(self, hash_seed: int) -> None:
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "whet.prove.training_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env.child_environment(**hash_seeded(hash_seed)),
            process_group=0,
        )
        self._newest: int | None = None
        """The life that was not waited for yet."""

    def load(self, target: str, arguments: dict[str, Any]) -> str | None:
        """Loads what the training needs; why its lives cannot be forks, or None."""
        threads = self._ask({"load": {"target": target, "arguments": arguments}}).get("threads")
        return None if threads == 1 else f"its libraries had started {threads} threads when they were loaded"

    def start(self, order: ProcessOrder) -> TrainingProcess:
        """A fork that lives the order."""
        pid = self._newest = int(self._ask({"live": order.as_json()})["pid"])

        def wait(seconds: float) -> int | None:
            code: int | None = self._ask({"wait": {"pid": pid, "seconds": seconds}})["code"]
            self._newest = None
            return code

        return TrainingProcess(pid, order, wait)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.write(json.dumps(request).encode() + b"\n")
        self._zygote.stdin.flush()
        answer = self._zygote.stdout.readline()
        if not answer:
            raise RuntimeError(f"the parent of the lives ended with code {self._zygote.wait()}")
        return dict(json.loads(answer))

    def __enter__(self) -> "ForkLauncher":
        return self

    def __exit__(self, *_: object) -> None:
        if self._newest is not None:
            kill_group(self._newest)
        self._zygote.kill()
        self._zygote.wait()
        for pipe in (self._zygote.stdin, self._zygote.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


def kill_group(pid: int) -> None:
    """Kills what is left of a life's processes."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def hash_seeded(seed: int) -> dict[str, str]:
    """Python orders sets of text anew in each process: lives must differ in it, and alike each time. Yours is kept."""
    return {} if env.read(HASH_SEED) else {HASH_SEED: str(seed % 2**32)}
