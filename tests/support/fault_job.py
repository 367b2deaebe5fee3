"""A tiny training that tests run, break and resume in a separate process: `main([JSON])`.

It logs its actions to a side file, line by line, so that a test knows where it was when it died.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import whet
from faulty_disk import FaultyDisk
from whet.checkpoint import store, writer
from whet.data import workers
from whet.run import durable
from whet.training.callbacks.checkpoint_schedule import WriteMode

DEFAULTS: dict[str, Any] = {
    "global_batch_size": 8,
    "epochs": 2,
    "schedule": "cosine",
    "warmup_steps": 2,
    "clip": 1.0,
    "ema": True,
    "eval_every": 5,
    "seed": 11,
}


class Noisy(Dataset):
    """Samples with augmentation: draws depend on the epoch and the sample.

    `harm` is a fault in the process that reads a sample: {"sample": 17, "how": "SIGKILL", "times": 1, "mark": PATH}.
    """

    def __init__(self, x: torch.Tensor, y: torch.Tensor, harm: dict[str, Any] | None = None) -> None:
        self._x, self._y, self._harm, self._trainer = x, y, harm, os.getpid()

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._harm is not None and self._harm["how"] == "slow":
            time.sleep(0.02)
        elif self._harm is not None and index == self._harm["sample"]:
            self._suffer(self._harm["how"])
        return {"x": self._x[index] + 0.1 * torch.randn(self._x.shape[1]), "y": self._y[index]}

    def _suffer(self, how: str) -> None:
        if how == "raise":
            raise ValueError("a truncated image")
        marks = Path(self._harm["mark"])
        done = marks.stat().st_size if marks.exists() else 0
        if os.getpid() == self._trainer or done >= self._harm["times"]:
            return
        with marks.open("ab") as file:
            file.write(b"x")
        if how == "exit":
            os._exit(7)
        elif how == "SystemExit":
            sys.exit(8)
        elif how == "hang":
            time.sleep(1000)
        else:
            os.kill(os.getpid(), getattr(signal, how))


def make_model(width: int) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(6, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(width, width),
        nn.Linear(width, 3),
    )


def make_data(num_samples: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, 6, generator=generator)
    return x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long()


def main(arguments: list[str]) -> int:
    options = {**DEFAULTS, **json.loads(arguments[0])}
    run, side = Path(options.pop("run")), Path(options.pop("side"))
    descriptor = os.open(side, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def report(line: str) -> None:
        os.write(descriptor, f"{line}\n".encode())

    # Saves of a few bytes would be faster in the foreground, but the writer thread is tested here.
    WriteMode.is_background = True  # type: ignore[assignment,method-assign]
    plant(options.pop("mutant", None))
    report("begin")
    durable.disk = FaultyDisk(options.pop("fault", "none"), at=options.pop("at", 0), report=report)
    watch_saves(report)
    model = make_model(options.pop("width", 16))
    data: Any = make_data(options.pop("samples", 80), seed=options.pop("data_seed", 0))
    harm = options.pop("harm", None)
    if options.pop("mapped", False):
        data = Noisy(*data, harm)
    workers.WORKER_TIMEOUT_SECONDS = options.pop("worker_timeout", workers.WORKER_TIMEOUT_SECONDS)
    stop_at: dict[str, str] = options.pop("stop_at", {})
    pause_at, pause_seconds = str(options.pop("pause_at", "")), options.pop("pause_seconds", 0.0)
    act_at: dict[str, str] = options.pop("act_at", {})

    def loss(micro: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(micro.x), micro.y)

    def evaluate(model: nn.Module, micro_batches: Any) -> dict[str, float]:
        right = [(model(micro.x).argmax(1) == micro.y).float().mean() for micro in micro_batches]
        torch.rand(3)
        return {"accuracy": float(torch.stack(right).mean())}

    name = options.pop("optimizer", "adamw")
    choice = whet.OptimizerChoice(name=name, lr=1e-2)
    overrides = {"threads": 1, **options.pop("overrides", {})}
    evaluates = options.pop("evaluates", True)
    val = {"evaluate": evaluate, "val": make_data(16, seed=1), "goal": "accuracy"} if evaluates else {}

    def on_event(kind: str, fields: dict[str, Any]) -> None:
        if kind in ("start", "resume"):
            report(f"{kind} {fields['step']} {fields.get('exactness', '')}")
        elif kind == "end":
            report(f"end {fields['state']} {durable.disk.count}")
        elif kind == "warning":
            disk = f"{fields.get('errno')} {fields['reason']} again {fields['retry']} free {fields.get('free_bytes')}"
            report(f"warning {disk}")

    # BatchNorm: another split is another training, which these jobs ask for.
    is_split = {"split_batch": True} if "micro_batch" in overrides else {}
    options |= {"run": run, "overrides": overrides, "on_event": on_event, "goal": val.get("goal"), **is_split}
    with whet.Session(model, choice, data, **options) as session:
        report(f"ready {durable.disk.count}")
        if val and session.due("evaluate"):
            session.evaluate(evaluate, val["val"])
        for batch in session:
            number = str(session.state.step + 1)
            report(f"step {number}")
            if number == pause_at:
                readers = session.run.source.workers._workers
                report(f"workers {json.dumps([reader.process.pid for reader in readers])}")
                time.sleep(pause_seconds)
            act(act_at.get(number), run)
            if number in stop_at:
                os.kill(os.getpid(), getattr(signal, stop_at[number]))
            session.step(loss, batch)
            if val and session.due("evaluate"):
                session.evaluate(evaluate, val["val"])
        report(f"over {durable.disk.count}")
    report("left")
    return session.exit_code


def watch_saves(report: Any) -> None:
    """Phase markers: around the writing of a checkpoint, and around the removal of old ones."""
    save, retain = store.save_checkpoint, writer.apply_retention

    def reported_save(folder: Path, snapshot: Any, *, step: int) -> int:
        report(f"save {step}")
        size = save(folder, snapshot, step=step)
        report(f"saved {step}")
        return size

    def reported_retain(*arguments: Any, **options: Any) -> list[int]:
        report("retain")
        removed = retain(*arguments, **options)
        report(f"retained {removed}")
        return removed

    store.save_checkpoint, writer.apply_retention = reported_save, reported_retain


def act(what: str | None, run: Path) -> None:
    """A fault of the disk in the middle of a run."""
    if what is None:
        return
    for thread in threading.enumerate():
        if thread.name == "whet-checkpoint":
            thread.join()
    if what == "fill":
        free = shutil.disk_usage(run).free
        (run.parent / "ballast").write_bytes(bytes(max(0, free - 8192)))
    elif what == "empty":
        (run.parent / "ballast").unlink()
    elif what == "ro":
        place = str(run / "checkpoints")
        subprocess.run(["mount", "--bind", place, place], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", place], check=True)
    elif what == "rw":
        subprocess.run(["umount", str(run / "checkpoints")], check=True)
    elif what == "vanish":
        shutil.rmtree(run / "checkpoints")


def plant(mutant: str | None) -> None:
    """A fault in whet itself, which a test must notice."""
    if mutant is not None:
        import mutants

        mutants.PLANT[mutant]()
