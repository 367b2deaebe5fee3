"""Functions that tests run in child processes."""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from whet.base.errors import UsageError
from whet.base.worker import WorkerChannel, error_to_json

HANG_SECONDS = 600
"""Far longer than any test waits."""


def echo(channel: WorkerChannel, arguments: dict[str, Any]) -> int:
    """Send each message back, with the arguments."""
    for message in channel.messages():
        channel.send({**arguments, **message})
    return 0


def read_payload(channel: WorkerChannel, arguments: dict[str, Any]) -> int:
    """Send the size and hash of the payload. With `dies_after`, end after this many bytes of it."""
    assert channel.payload is not None
    if "dies_after" in arguments:
        channel.payload.read(arguments["dies_after"])
        os.kill(os.getpid(), signal.SIGKILL)
    content = channel.payload.read()
    channel.send({"bytes": len(content), "hash": hashlib.sha256(content).hexdigest()})
    return 0


def describe_process(channel: WorkerChannel, _arguments: dict[str, Any]) -> int:
    channel.send({"path": sys.path, "python_path": os.environ.get("PYTHONPATH"), "stdin": sys.stdin.read()})
    return 0


def misbehave(channel: WorkerChannel, arguments: dict[str, Any]) -> int:
    os.write(1, b'{"printed": true}\n')
    print("a complaint", file=sys.stderr, flush=True)
    match arguments["how"]:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hangs":
            time.sleep(HANG_SECONDS)
        case "raises":
            raise ValueError("nonsense")
        case "exits":
            raise SystemExit(3)
        case "takes memory":
            taken = bytearray(arguments["bytes"])
            time.sleep(HANG_SECONDS)
            del taken
        case "usage error":
            channel.send(error_to_json(UsageError("no such data", got="nothing", try_="data=FILE")))
        case "leaves a child":
            if os.fork() == 0:
                time.sleep(HANG_SECONDS)
            channel.send({"done": True})
    return 0


def train_trial(_arguments: dict[str, Any], may_continue: Any) -> int:
    """A trial of a search with one evaluation."""
    return 0 if may_continue(1, 0.5, True) else 1


def train_piece(run: Path, arguments: dict[str, Any], *, on_event: Any) -> None:
    """A training that can be proved, without torch."""
    run.mkdir(parents=True, exist_ok=True)
    on_event("start", {"step": 0})


class Numbers:
    """A dataset of eight numbers, whose module a spawned worker imports."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def read_with_workers(start: str) -> int:
    """Return the number of samples that a data worker reads."""
    from whet.data.batch import Position
    from whet.data.order import SeededOrder
    from whet.data.sample import DatasetReader
    from whet.data.workers import Workers

    order = SeededOrder(8, batch_size=4, seed=0)
    workers = Workers(DatasetReader(Numbers(), 0), order, count=1, start=start, prefetch=1)
    try:
        return sum(len(samples) for samples, _ in workers.batches(Position()))
    finally:
        workers.close()
