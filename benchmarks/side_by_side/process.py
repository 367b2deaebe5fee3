"""Start and control the process of a loop."""

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from side_by_side.spec import Spec
from whet.base import env

HERE = Path(__file__).parent.parent


class LoopFailedError(Exception):
    """The process ended without an answer; the message is its last error line."""


class LoopProcess:
    """A child process that computes only between a command and its answer.

    None in `variables` removes a variable. `cache` is the folder of compiled code and of whet's evidence, by default a
    separate one that is removed afterwards, so that no loop profits from another.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        variables: Mapping[str, str | None] | None = None,
        cache: Path | None = None,
        limit: float | None = None,
    ) -> None:
        self.spec = spec
        self.limit = limit
        """Seconds after which an answer that was ordered is given up, and the process is killed."""
        self._timer: threading.Timer | None = None
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._stderr = Path(self._folder.name) / "stderr.txt"
        self.cache = cache or Path(self._folder.name)
        environment = {
            **env.child_environment(
                PYTHONPATH=f"{HERE}:{env.read('PYTHONPATH') or ''}",
                TORCHINDUCTOR_CACHE_DIR=str(self.cache),
                WHET_HOME=str(self.cache / "whet"),
                TMPDIR=self._folder.name,
                TOKENIZERS_PARALLELISM="false",
            ),
            **(variables or {}),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "side_by_side.child", json.dumps(spec.as_json())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr.open("w"),
            text=True,
            env={name: value for name, value in environment.items() if value is not None},
        )
        self.made: dict[str, Any] = {}
        self.first: dict[str, Any] = {}
        """The answer to the first step, if it was run ahead of its turn."""

    def wait_made(self) -> dict[str, Any]:
        """Wait for the facts about the workload; {"absent": reason} if a package is missing."""
        self.made = self.answer()
        return self.made

    def order(self, **command: Any) -> None:
        assert self._process.stdin is not None
        if self.limit is not None:
            self._timer = threading.Timer(self.limit, self._process.kill)
            self._timer.start()
        try:
            print(json.dumps(command), file=self._process.stdin, flush=True)
        except OSError:
            raise LoopFailedError(self._error_line()) from None

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if self._timer is not None:
            self._timer.cancel()
        if not line:
            self._process.wait()
            raise LoopFailedError(self._error_line())
        return dict(json.loads(line))

    def steps(self, count: int) -> dict[str, Any]:
        """Run steps and return the answer with their duration."""
        self.order(steps=count)
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def _error_line(self) -> str:
        lines = self._stderr.read_text(errors="replace").strip().splitlines()
        line = next(
            (text for text in reversed(lines) if "Error" in text or "error" in text), lines[-1] if lines else ""
        )
        return f"exit code {self._process.poll()}: {line.strip()[:300]}"

    @property
    def output(self) -> str:
        """Everything the process wrote to stderr."""
        return self._stderr.read_text(errors="replace")
