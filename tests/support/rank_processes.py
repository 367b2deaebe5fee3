"""Start several processes that train together, and check their results: real processes, gloo, forks of one."""

import contextlib
import itertools
import json
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fork_server import TIMEOUT_SECONDS, ForkedProcess, ForkServer
from whet.checkpoint import store
from whet.run.folder import open_run

JOB = Path(__file__).parent / "rank_fault_job.py"
_NUMBERS = itertools.count()


@dataclass
class Ranks:
    """The processes of one session and their output."""

    lives: list[ForkedProcess]
    side: Path

    def reported(self, word: str, *, rank: int = 0) -> list[str]:
        """Return the rest of all lines of a process with this prefix."""
        lines = self.side.read_text().splitlines() if self.side.exists() else []
        start = f"{rank} {word} "
        return [line[len(start) :] for line in lines if f"{line} ".startswith(start)]

    def wait(self, *, seconds: float = TIMEOUT_SECONDS) -> list[int]:
        try:
            return [life.wait(seconds=seconds).code for life in self.lives]
        except AssertionError:
            for life in self.lives:
                with contextlib.suppress(ProcessLookupError):
                    life.send(signal.SIGKILL)
            raise

    def finish(self, *codes: int) -> "Ranks":
        for life in self.lives:
            code, errors = life.wait()
            assert code in (codes or (0,)), errors
        return self


def start(fork_server: ForkServer, run: Path, size: int, **options: Any) -> Ranks:
    side = run.parent / f"side-{next(_NUMBERS)}.txt"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lives = []
    for rank in range(size):
        environment = (
            {}
            if size == 1
            else {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        )
        words = {**options, "run": str(run), "side": str(side), "environment": environment}
        lives.append(fork_server.start(JOB, json.dumps(words)))
    return Ranks(lives, side)


def train(fork_server: ForkServer, run: Path, size: int, **options: Any) -> Ranks:
    """Run until the end, or until `stop_at`."""
    return start(fork_server, run, size, **options).finish(*((143,) if "stop_at" in options else ()))


def state(run: Path, step: int | None = None) -> store.Snapshot:
    """Return the newest checkpoint, or that of a step, as a single process reads it."""
    folder = open_run(run).checkpoints
    if step is not None:
        return store.load_checkpoint(folder / store.checkpoint_name(step))
    result = store.load_newest(folder)
    assert result is not None
    assert not result.rejected
    return result.snapshot


def trained(snapshot: store.Snapshot) -> dict[str, torch.Tensor]:
    """Weights, EMA and optimizer state; each process has its own generators."""
    return {name: t for name, t in snapshot.tensors.items() if not name.startswith("rng/")}


def is_same(ours: store.Snapshot, theirs: store.Snapshot) -> bool:
    """Assert equality bit for bit."""
    one, two = trained(ours), trained(theirs)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def distance(ours: store.Snapshot, theirs: store.Snapshot) -> float:
    """The relative L2 distance of all weights."""
    one, two = (
        torch.cat([t.double().flatten() for name, t in sorted(trained(s).items()) if name.startswith("model/")])
        for s in (ours, theirs)
    )
    return float((one - two).norm() / two.norm())


def order(*sittings: Ranks) -> dict[int, str]:
    """Return the samples of each step, as rank 0 reports them; later sessions take precedence."""
    logged = (line.partition(" ") for session in sittings for line in session.reported("step"))
    return {int(step): ids for step, _, ids in logged}
