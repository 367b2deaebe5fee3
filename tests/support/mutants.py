"""Faults in whet itself, planted in one process: each must be detected by a test."""

import contextlib
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whet.checkpoint import snapshot, store, writer
from whet.device.random_streams import RandomStreams
from whet.run import durable
from whet.run.disk import Disk
from whet.training import checkpointer


def _no_sync(which: Callable[[bool], bool]) -> None:
    def patched(real: Callable[[Disk, int], None]) -> Callable[[Disk, int], None]:
        def sync(self: Disk, descriptor: int) -> None:
            if not which(stat.S_ISDIR(os.fstat(descriptor).st_mode)):
                real(self, descriptor)

        return sync

    Disk.sync, Disk.full_sync = patched(Disk.sync), patched(Disk.full_sync)  # type: ignore[method-assign]


def _write_in_place() -> None:
    def publish(path: Path, *, fill: Callable[[Path], None]) -> None:
        durable.disk.make_folder(path)
        fill(path)

    real = durable.publish_directory
    durable.publish_directory = lambda path, *, fill: (publish if "step-" in path.name else real)(path, fill=fill)


def _rename_first() -> None:
    real = durable.publish_directory

    def publish(path: Path, *, fill: Callable[[Path], None]) -> None:
        if "step-" not in path.name:
            return real(path, fill=fill)
        draft = durable.leftover_name(path)
        durable.disk.make_folder(draft)
        durable.disk.rename(draft, path)
        return fill(path)

    durable.publish_directory = publish


def _no_hash() -> None:
    real = store.read_verified
    store.read_verified = lambda path, *, expected=None: real(path)


def _forget(role: str) -> None:
    """The saved state of a new run instead of the current one."""
    real = snapshot.take_snapshot

    def take(*arguments: Any, **options: Any) -> snapshot.Snapshot:
        taken = real(*arguments, **options)
        for name in [name for name in taken.tensors if name.startswith(f"{role}/")]:
            taken.tensors[name] = taken.tensors[name].clone().zero_()
        return taken

    checkpointer.take_snapshot = take


def _forget_randomness() -> None:
    RandomStreams.restore = lambda *arguments: None


def _forget_facts(*path: str, value: Any) -> None:
    real = snapshot.take_snapshot

    def take(*arguments: Any, **options: Any) -> snapshot.Snapshot:
        taken = real(*arguments, **options)
        place = taken.facts
        for name in path[:-1]:
            place = place[name]
        if taken.facts["step"] > 0:
            place[path[-1]] = value
        return taken

    checkpointer.take_snapshot = take


def _remove_first() -> None:
    real = store.save_checkpoint

    def save(folder: Path, taken: Any, *, step: int) -> int:
        for old in store.list_steps(folder)[:-1]:
            with contextlib.suppress(Exception):
                durable.remove(folder / store.checkpoint_name(old))
        return real(folder, taken, step=step)

    store.save_checkpoint = save
    writer.apply_retention = lambda *arguments, **options: []


def _no_copy() -> None:
    """Later steps change the state while it is being written, slowly enough to be certain."""
    writer.StagingBuffer.copy = lambda self, taken: taken  # type: ignore[method-assign]
    real = store.save_checkpoint

    def save(folder: Path, taken: Any, *, step: int) -> int:
        time.sleep(0.3 if step else 0)
        return real(folder, taken, step=step)

    store.save_checkpoint = save


PLANT: dict[str, Callable[[], None]] = {
    "no fsync": lambda: _no_sync(lambda is_folder: True),
    "no file fsync": lambda: _no_sync(lambda is_folder: not is_folder),
    "no folder fsync": lambda: _no_sync(lambda is_folder: is_folder),
    "written in place": _write_in_place,
    "renamed before it is full": _rename_first,
    "no manifest hash": _no_hash,
    "randomness not saved": _forget_randomness,
    "position not saved": lambda: _forget_facts("progress", "progress", "position", value={"epoch": 0, "samples": 0}),
    "average not saved": lambda: _forget("ema"),
    "optimizer not saved": lambda: _forget("optimizer"),
    "scaler not saved": lambda: _forget_facts("scaler", value={}),
    "schedule not saved": lambda: _forget_facts(
        "progress", "schedule", value={"best": None, "num_bad": 0, "reduction": 1.0}
    ),
    "old ones removed before the new one is there": _remove_first,
    "written from live tensors": _no_copy,
}
