"""Write checkpoints in the background: staging buffer, writer thread, retention."""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from whet.base.errors import WhetError
from whet.checkpoint import store
from whet.checkpoint.encoding import layout_tensors
from whet.checkpoint.manifest import DamagedCheckpointError
from whet.checkpoint.snapshot import Snapshot
from whet.device.abstract import AbstractDevice
from whet.machine import linux
from whet.run import durable

MILESTONE_SHARE = 0.1
"""A milestone is the first checkpoint of every tenth of the run."""
MAX_MILESTONES = 2
"""The newest of them are kept: with the last two and the best that is at most five checkpoints on the disk."""
MIN_MILESTONE_STEPS = 100
"""A shorter run is begun anew sooner than it goes back."""


def milestones(steps: list[int], *, total_steps: int | None) -> list[int]:
    """The newest milestones among steps; a run without a known end has none.

    >>> milestones([0, 40, 110, 150, 210, 350, 390], total_steps=1000)
    [210, 350]
    """
    if total_steps is None or total_steps < MIN_MILESTONE_STEPS:
        return []
    first: dict[int, int] = {}
    for step in sorted(steps):
        first.setdefault(int(step / (total_steps * MILESTONE_SHARE)), step)
    return [step for tenth, step in first.items() if tenth > 0][-MAX_MILESTONES:]


def apply_retention(
    folder: Path,
    *,
    acknowledged: int,
    keep: int,
    best: int | None,
    total_steps: int | None,
    refused: Container[int] = (),
) -> list[int]:
    """Removes what is not kept; the steps removed. `acknowledged` was written by this process a moment ago.

    Nothing goes unless that one is whole, so the only good checkpoint never does. Damaged folders do not count
    among the last `keep`, nor do those that were `refused` when they were read, whose sizes may be right; and newer
    ones than `acknowledged` can only be damaged: the run went on from before them.
    """
    try:
        store.check_sizes(folder / store.checkpoint_name(acknowledged))
    except WhetError:
        return []
    there = store.list_steps(folder)
    whole = [s for s in there if s <= acknowledged and s not in refused and _is_whole(folder, s)]
    kept = {*whole[-keep:], *milestones(whole, total_steps=total_steps), best, acknowledged}
    doomed = [step for step in there if step not in kept]
    for step in doomed:
        durable.remove(folder / store.checkpoint_name(step))
    return doomed


def free_disk_space(folder: Path, *, num_bytes: int, keep: int, best: int | None, refused: Container[int] = ()) -> None:
    """Before a write: without free space for two more checkpoints and 5 %, milestones go first."""
    free = durable.free_bytes(folder)
    if free is None or free >= 2 * num_bytes * 1.05:
        return
    whole = [step for step in store.list_steps(folder) if step not in refused and _is_whole(folder, step)]
    for step in whole[:-keep]:
        if step != best:
            durable.remove(folder / store.checkpoint_name(step))


def _is_whole(folder: Path, step: int) -> bool:
    try:
        store.check_sizes(folder / store.checkpoint_name(step))
    except DamagedCheckpointError:
        return False
    except WhetError:
        return True  # Another format, or a disk that does not answer: not ours to remove.
    return True


FREE_MEMORY_FACTOR = 1.5
"""A buffer is made only where this many times its size is free."""


class StagingBuffer:
    """A copy of the newest state, laid out as in the file. Filling a used buffer is 10 times faster than a new one."""

    def __init__(self, device: AbstractDevice) -> None:
        self._device = device
        self._buffer: Tensor | None = None

    def has_room(self, num_bytes: int) -> bool:
        """Whether the state may lie in memory twice: never where the device shares the host's memory."""
        if self._device.memory.is_shared_with_host:
            return False
        if self._buffer is not None and self._buffer.numel() == num_bytes:
            return True
        # A container may be allowed less than the machine has.
        free = linux.min_known(psutil.virtual_memory().available, linux.read_cgroup_limits().memory_left_bytes)
        return free is not None and free >= FREE_MEMORY_FACTOR * num_bytes

    @torch.no_grad()
    def copy(self, snapshot: Snapshot) -> Snapshot:
        """The same state in the buffer; training may go on when this returns. The copy lasts until the next one."""
        layout = layout_tensors(snapshot.tensors)
        if self._buffer is None or self._buffer.numel() != layout.num_bytes:
            self._buffer = None
            self._buffer = self._device.memory.host_buffer(layout.num_bytes)
        staged: dict[str, Tensor] = {}
        for name, place in layout.places.items():
            room = self._buffer[place.start : place.end]
            staged[name] = room.view(place.dtype).view(place.shape) if len(room) else snapshot.tensors[name].cpu()
            staged[name].copy_(snapshot.tensors[name].detach(), non_blocking=True)
        self._device.sync()
        return dataclasses.replace(snapshot, tensors=staged)


WriteJob = Callable[["PendingWrite"], None]
"""Writes one checkpoint and fills in what it found; what it raises is why there is none."""

_NICENESS = 10


@dataclass(kw_only=True, slots=True)
class PendingWrite:
    """One write, under way or ended."""

    step: int
    is_background: bool
    """In a thread, while the training goes on."""
    num_bytes: int = 0
    cleanup_error: WhetError | None = None
    """Why old checkpoints could not be removed; the new one is safe all the same."""
    seconds: float = 0.0
    """Until it was safe, or had failed, the copying before it included."""
    error: BaseException | None = None


class CheckpointWriter:
    """Runs one job at a time, here or in a thread; whoever began it collects how it ended.

    The thread is not a daemon: a process that ends by itself waits for it.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._write: PendingWrite | None = None

    @property
    def step(self) -> int | None:
        """The step that is being written, or was and is not collected yet."""
        return None if self._write is None else self._write.step

    @property
    def is_busy(self) -> bool:
        """Whether a thread writes at this moment."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, step: int, job: WriteJob, *, in_background: bool, start: float) -> None:
        """Runs `job`; counts from `start`. The last one must have been collected."""
        assert self._write is None, "one write at a time"
        write = self._write = PendingWrite(step=step, is_background=in_background)
        if not in_background:
            _run(write, job, start)
            return
        arguments = (write, job, start)
        self._thread = threading.Thread(target=_run_in_background, args=arguments, name="whet-checkpoint", daemon=False)
        self._thread.start()

    def collect(self, *, wait: bool) -> PendingWrite | None:
        """How the last write ended, once; None when there is none, or it is still under way and `wait` is off."""
        if self._write is None or (self.is_busy and not wait):
            return None
        if self._thread is not None:
            self._thread.join()
        write, self._write, self._thread = self._write, None, None
        return write


def _run_in_background(write: PendingWrite, job: WriteJob, start: float) -> None:
    # Linux gives threads a priority of their own; elsewhere this is refused, or means the thread's process: left alone.
    if os.uname().sysname == "Linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    _run(write, job, start)


def _run(write: PendingWrite, job: WriteJob, start: float) -> None:
    try:
        job(write)
    except Exception as error:
        write.error = error
    finally:
        write.seconds = time.perf_counter() - start
