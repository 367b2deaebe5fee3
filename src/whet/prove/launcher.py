"""Start training processes, either as new processes or as forks of a warm process, and kill them."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any, Protocol, Self

from whet.base import env
from whet.base.worker import JsonWorker, WorkerExitError, WorkerTimeoutError, kill_group
from whet.prove.training_process import ProcessOrder

_HASH_SEED = "PYTHONHASHSEED"
_POLL_SECONDS = 0.002
# Time limit for imports: importing torch from a slow disk may take minutes.
_LOAD_SECONDS = 600.0
# Extra time for the fork server to respond on a busy machine.
_SLACK_SECONDS = 60.0


class TrainingProcess:
    """One training process, which may be running or have ended."""

    def __init__(self, pid: int, order: ProcessOrder, wait: Callable[[float], int | None]) -> None:
        self.pid, self.order = pid, order
        self.started = time.monotonic()
        self.seconds = 0.0
        """Duration of the process in seconds, set by `wait`."""
        self._wait = wait

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> int | None:
        """Wait for the process and return its exit code (negative signal number if killed).

        Return None if it was still running after `seconds` and was therefore killed.
        """
        code = self._wait(seconds)
        self.seconds = time.monotonic() - self.started
        # Kill its worker processes too, which would otherwise end seconds later.
        kill_group(self.pid)
        return code

    def messages(self, kind: str) -> list[dict[str, Any]]:
        """Return the messages of one kind that the process has written so far."""
        path = self.order.messages
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [message for message in map(json.loads, lines) if message["kind"] == kind]

    def wait_for(self, kind: str, seconds: float, *, count: int = 1) -> bool:
        """Wait for `count` messages of one kind. Return False if the process ends first, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if len(self.messages(kind)) >= count:
                return True
            if self.messages("failed") or self.messages("end"):
                return False
            time.sleep(_POLL_SECONDS)
        return False

    @property
    def start_seconds(self) -> float:
        """Seconds from the start of the process to the start of training."""
        return next((float(message["time"]) - self.started for message in self.messages("ready")), self.seconds)

    @property
    def resumed_from(self) -> int:
        """The step that the process resumed from. 0 for a new run, or if it was killed before it reported the step."""
        return int(next((message["step"] for message in self.messages("ready")), 0))

    def failure(self) -> str:
        """Describe why the process failed."""
        for message in self.messages("failed"):
            return f"{message['what']}: {message.get('got')}"
        path = self.order.output
        output = path.read_text(errors="replace").strip() if path.exists() else ""
        return output.splitlines()[-1][:300] if output else "no output"


class Launcher(Protocol):
    """The interface for starting training processes."""

    def start(self, order: ProcessOrder) -> TrainingProcess: ...


class ProcessLauncher:
    """A context manager that starts a new Python process for each training run. Slow, but closest to real use."""

    def __init__(self, hash_seed: int) -> None:
        self._environment = env.child_environment(**_hash_seed_variable(hash_seed))
        self._newest: JsonWorker | None = None

    def start(self, order: ProcessOrder) -> TrainingProcess:
        """Start a training run in a new process."""
        worker = self._newest = JsonWorker(
            "whet.prove.training_process:run_order", order.as_json(), environment=self._environment
        )

        def wait(seconds: float) -> int | None:
            code = worker.wait(seconds)
            worker.close()
            self._newest = None
            return code

        return TrainingProcess(worker.pid, order, wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._newest is not None:
            self._newest.close()


class ForkLauncher:
    """A context manager that forks each training process from one that has imported torch. Linux and CPU only."""

    def __init__(self, hash_seed: int) -> None:
        environment = env.child_environment(**_hash_seed_variable(hash_seed))
        target = "whet.prove.training_process:serve_forks"
        self._server = JsonWorker(target, environment=environment, is_threaded=False)
        self._newest: int | None = None
        """Process id of the latest fork until `wait` returns, else None."""

    def load(self, target: str, arguments: dict[str, Any]) -> str | None:
        """Import the modules that training needs. Return the reason why the process cannot be forked, or None."""
        threads = self._request({"load": {"target": target, "arguments": arguments}}, _LOAD_SECONDS).get("threads")
        return None if threads == 1 else f"its libraries started {threads} threads when they were imported"

    def start(self, order: ProcessOrder) -> TrainingProcess:
        """Start a training run in a fork."""
        pid = self._newest = int(self._request({"start": order.as_json()}, _SLACK_SECONDS)["pid"])

        def wait(seconds: float) -> int | None:
            request = {"wait": {"pid": pid, "seconds": seconds}}
            code: int | None = self._request(request, seconds + _SLACK_SECONDS)["code"]
            self._newest = None
            return code

        return TrainingProcess(pid, order, wait)

    def _request(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        try:
            return self._server.request(message, timeout=timeout)
        except (WorkerExitError, WorkerTimeoutError):
            raise RuntimeError(f"the fork server failed: {self._server.describe_exit()}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._newest is not None:
            kill_group(self._newest)
        self._server.close()


def _hash_seed_variable(seed: int) -> dict[str, str]:
    """Return the environment variable that fixes the hash seed, or nothing if the user has set it.

    Each launcher has a different seed, so that the order of sets of strings differs between them, but is reproducible.
    """
    return {} if env.read(_HASH_SEED) else {_HASH_SEED: str(seed % 2**32)}
