"""A way's process as its parent sees it: started, ordered, asked, ended."""

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from side_by_side.spec import Spec
from whet.base import env

HERE = Path(__file__).parent.parent


class WayFailedError(Exception):
    """The process ended without an answer; its last words."""


class Way:
    """One process; it computes only between an order and its answer."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._said = Path(self._folder.name) / "said.txt"
        # What one way has compiled must not save time to another; and all it leaves behind lies in one place.
        environment = env.child_environment(
            PYTHONPATH=f"{HERE}:{env.read('PYTHONPATH') or ''}",
            TORCHINDUCTOR_CACHE_DIR=self._folder.name,
            TMPDIR=self._folder.name,
            TOKENIZERS_PARALLELISM="false",
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "side_by_side.child", json.dumps(spec.as_json())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said.open("w"),
            text=True,
            env=environment,
        )
        self.made: dict[str, Any] = {}
        self.first: dict[str, Any] = {}
        """The answer to the order of the first step, where it came before its turn."""

    def wait_made(self) -> dict[str, Any]:
        """What the work is; {"absent": why} where a package is not there."""
        self.made = self.answer()
        return self.made

    def order(self, **words: Any) -> None:
        assert self._process.stdin is not None
        try:
            print(json.dumps(words), file=self._process.stdin, flush=True)
        except OSError:
            raise WayFailedError(self._last_words()) from None

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise WayFailedError(self._last_words())
        return dict(json.loads(line))

    def steps(self, count: int) -> dict[str, Any]:
        """Makes so many steps; the seconds they took, and what else it says."""
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

    def _last_words(self) -> str:
        lines = self._said.read_text(errors="replace").strip().splitlines()
        told = next(
            (line for line in reversed(lines) if "Error" in line or "error" in line), lines[-1] if lines else ""
        )
        return f"exit code {self._process.poll()}: {told.strip()[:300]}"

    @property
    def whole_words(self) -> str:
        """All that the process wrote."""
        return self._said.read_text(errors="replace")
