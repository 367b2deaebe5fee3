"""One of several processes that train a small model together; started by `ranks.py`, or by torchrun.

`python rank_fault_job.py '{"run": ..., "sharding": "full", ...}'`
"""

import atexit
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import whet
from whet.checkpoint import sharded_save, store
from whet.checkpoint.writer import StagingBuffer
from whet.distributed import heartbeat
from whet.distributed.group import current_group
from whet.training import checkpointer
from whet.training.callbacks.checkpoint_schedule import WriteMode

SAMPLES, BATCH, STEPS = 44, 8, 12
"""Six steps an epoch, the last of four samples: fewer than eight processes."""


class Net(nn.Module):
    """Rows that four processes cannot share evenly, fewer rows than processes, a buffer, dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 3)
        self.drop = nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.linspace(0, 1, 10))

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x) + self.shift)).relu()) * self.scale


def main(arguments: list[str]) -> int:
    options: dict[str, Any] = json.loads(arguments[0])
    os.environ.update(options.get("environment", {}))
    rank = int(os.environ.get("RANK", "0"))
    side = Path(options["side"]) if "side" in options else None

    def report(line: str) -> None:
        if side is not None:
            with side.open("a") as file:
                file.write(f"{rank} {line}\n")

    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = Net(options.get("dropout", 0.2))
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(SAMPLES, 6, generator=draw), torch.randint(0, 3, (SAMPLES,), generator=draw)
    _pause_where(options.get("pause"), rank, report)
    if options.get("beside"):
        # As on a device with separate memory: the state is copied, and a thread writes it.
        StagingBuffer.has_capacity = lambda _self, _num_bytes: True
        WriteMode.is_background = True

    heartbeat.MIN_STALL_SECONDS = options.get("least_seconds", heartbeat.MIN_STALL_SECONDS)
    loops, naps = options.get("loops", [None, 0]), options.get("naps", [None, 0, 0.0])

    def loss(micro):
        time.sleep(options.get("seconds", 0.0))
        number = session.state.step + 1
        if [rank, number] == naps[:2]:
            time.sleep(naps[2])
        while [rank, number] == loops:
            pass
        return nn.functional.cross_entropy(model(micro.x), micro.y)

    def evaluate(model, micro_batches):
        time.sleep(options.get("evaluates_seconds", 0.0))
        right = [(model(micro.x).argmax(1) == micro.y).float().sum() for micro in micro_batches]
        return {"accuracy": float(torch.stack(right).sum()) / SAMPLES}

    def on_event(kind: str, fields: dict[str, Any]) -> None:
        if kind in ("resume", "checkpoint"):
            report(f"{kind} {fields['step']} {fields.get('exactness', '')}")

    report(f"pid {os.getpid()}")
    if "RANK" in os.environ:
        current_group().heartbeat.notify = lambda line: report(f"lost {line}")
    with whet.Session(
        model,
        whet.OptimizerChoice(lr=1e-2),
        (x, y),
        run=options["run"],
        device=os.environ.get("WHET_RANKS_DEVICE", "cpu"),
        overrides={
            "precision": "fp32",
            "threads": 1,
            "sharding": options.get("sharding", "off"),
            "checkpoint_steps": 2,
            "micro_batch": 3,
        },
        goal="accuracy",
        on_event=on_event,
        global_batch_size=BATCH,
        epochs=100,
        max_steps=options.get("steps", STEPS),
        seed=11,
        ema=True,
        clip=1.0,
        schedule="cosine",
        warmup_steps=3,
    ) as session:
        if options.get("saves_again"):
            # Save the restored state again, as these ranks hold it.
            session.run.checkpointer._saved_step = None
            session._loop._save("last")
        for batch in session:
            session.step(loss, batch)
            report(f"step {session.state.step} {' '.join(str(int(i)) for i in batch.ids)}")
            if session.state.step == options.get("stop_at") and rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            if session.due("evaluate"):
                session.evaluate(evaluate, (x, y))
    report("left")
    # A fork of the fork server exits without Python's exit handlers.
    atexit._run_exitfuncs()
    return session.exit_code


def _pause_where(place: str | None, rank: int, report: Any) -> None:
    """Wait for a while during saving or loading, after reporting it, so that a test can kill the process."""
    if place is None:
        return
    what, _, who = place.partition(" ")
    if rank != int(who):
        return

    def stretched(real: Any, *, time_number: int) -> Any:
        calls = itertools.count(1)

        def slow(*arguments: Any, **words: Any) -> Any:
            if next(calls) == time_number:
                report(f"inside {what}")
                time.sleep(60)
            return real(*arguments, **words)

        return slow

    if what == "save":
        # Of the states after 0, 2 and 4 steps: the third.
        sharded_save.write_shard = stretched(sharded_save.write_shard, time_number=3)
        store.fill_draft = stretched(store.fill_draft, time_number=3)
    elif what == "load":
        checkpointer.load_on_all_ranks = stretched(checkpointer.load_on_all_ranks, time_number=1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
