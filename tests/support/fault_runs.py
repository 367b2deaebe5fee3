"""Start, break and check processes of the job. A run is the result of all its processes."""

import hashlib
import itertools
import json
import re
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fork_server import TIMEOUT_SECONDS, ForkedProcess, ForkServer, ProcessExit
from whet.checkpoint import encoding, store
from whet.checkpoint.encoding import as_bytes
from whet.run.events import read_events
from whet.run.folder import RUN_FILE, open_run

JOB = Path(__file__).parent / "fault_job.py"

BOUNDED, ALL = "bounded", pytest.param("all", marks=pytest.mark.slow)
"""Small enough for `make test`; `make test-all` does all of it."""


@dataclass
class Started:
    """One process and its output."""

    life: ForkedProcess
    side: Path

    def lines(self) -> list[str]:
        return self.side.read_text().splitlines() if self.side.exists() else []

    def wait_for(self, word: str, *, seconds: float = TIMEOUT_SECONDS) -> bool:
        """Return whether the process printed a line with this prefix before it ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ended = self.life.poll()
            lines = self.lines()
            if any(line.startswith(word) for line in lines):
                return True
            if any(line.startswith("left") for line in lines):
                return False
            assert ended is None, f"the process ended before {word!r}: {ended}"
            time.sleep(0.003)
        raise AssertionError(f"no {word!r} in {seconds} s")

    def reported(self, word: str) -> list[str]:
        """Return the rest of all lines with this prefix."""
        return [line[len(word) :].strip() for line in self.lines() if line.split(" ")[0] == word]

    @property
    def is_inside_save(self) -> bool:
        """Return whether the process ended during a save, including the deletion of old checkpoints."""
        logged = [line.split(" ")[0] for line in self.lines()]
        last = [word for word in logged if word in ("save", "saved", "retain", "retained")][-1:]
        return last in (["save"], ["retain"])

    @property
    def resumed_from(self) -> int:
        """Return the step it resumed from; 0 for a new run."""
        return int((self.reported("resume") or ["0"])[0].split(" ")[0])


class FaultRuns:
    """Starts processes in a folder."""

    def __init__(self, fork_server: ForkServer, folder: Path, **options: Any) -> None:
        self.folder = folder
        self._fork_server = fork_server
        self._options = options
        self._numbers = itertools.count()

    def start(self, run: Path, **options: Any) -> Started:
        side = self.folder / f"side-{next(self._numbers)}.txt"
        words = json.dumps({**self._options, **options, "run": str(run), "side": str(side)})
        return Started(self._fork_server.start(JOB, words), side)

    def finish(self, run: Path, **options: Any) -> Started:
        """Start one more process, which must reach the end."""
        started = self.start(run, **options)
        code, errors = started.life.wait()
        assert code == 0, errors
        return started

    def end(self, run: Path, **options: Any) -> tuple[ProcessExit, Started]:
        started = self.start(run, **options)
        return started.life.wait(), started


SMALL = partial(FaultRuns, samples=32, epochs=1, eval_every=3, overrides={"checkpoint_steps": 2})
"""FaultRuns of four steps that save at 0, 2, 3 (the first evaluation is the best so far) and 4."""


def digest(run: Path) -> str:
    """Return everything that must be equal: tensors by name, facts, losses and evaluations."""
    result = store.load_newest(open_run(run).checkpoints)
    assert result is not None
    total = hashlib.sha256(encoding.dump_json(result.snapshot.facts))
    for name in sorted(result.snapshot.tensors):
        total.update(name.encode())
        total.update(as_bytes(result.snapshot.tensors[name]))
    losses = {e.step: e.get("loss") for e in read_events(run, kinds=("step",))}
    scores = {e.step: e.get("accuracy") for e in read_events(run, kinds=("eval",))}
    total.update(repr((sorted(losses.items()), sorted(scores.items()))).encode())
    return total.hexdigest()


def published(run: Path) -> tuple[list[int], list[int]]:
    """Return the steps of complete checkpoints and of torn ones."""
    whole: list[int] = []
    torn: list[int] = []
    if (run / RUN_FILE).exists():
        for step in store.list_steps(run / "checkpoints"):
            try:
                store.load_checkpoint(run / "checkpoints" / store.checkpoint_name(step))
                whole.append(step)
            except store.DamagedCheckpointError:
                torn.append(step)
    return whole, torn


def leftovers(run: Path) -> int:
    return len(list((run / "checkpoints").glob(".tmp-*"))) if (run / "checkpoints").exists() else 0


def assert_kept(run: Path, started: Started) -> None:
    """No published checkpoint is torn; the newest that was acknowledged is there, or a newer one; never fewer than two
    once there were two."""
    whole, torn = published(run)
    assert torn == []
    acknowledged = [int(step) for step in started.reported("saved")]
    if acknowledged:
        assert whole, "an acknowledged checkpoint is gone"
        assert max(whole) >= max(acknowledged)
        assert len(whole) >= min(2, len(set(acknowledged))), "removed before the new one was safe"


def counts(**numbers: object) -> str:
    """A line for the summary.

    >>> counts(kills=40, inside_a_save=14)
    'kills: 40, inside a save: 14'
    """
    return ", ".join(f"{re.sub('_', ' ', name)}: {number}" for name, number in numbers.items())
