"""Background writing of checkpoints: writer thread, staging buffer and retention."""

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

WriteJob = Callable[["PendingWrite"], None]
"""Writes one checkpoint and stores the result in the PendingWrite. An exception means that the write failed."""

# Lower the thread's priority, so that training gets the CPU first.
_NICENESS = 10


@dataclass(kw_only=True, slots=True)
class PendingWrite:
    """A checkpoint write that is in progress or finished, with its result."""

    step: int
    is_background: bool
    """Whether a thread writes the checkpoint while training continues."""
    num_bytes: int = 0
    cleanup_error: WhetError | None = None
    """Error while removing old checkpoints. The new checkpoint is valid nevertheless."""
    seconds: float = 0.0
    """Seconds until the checkpoint was durable or had failed, including the copy to the staging buffer."""
    error: BaseException | None = None


class CheckpointWriter:
    """Runs one write at a time, in the calling thread or in the background. `collect` returns the result.

    The thread is not a daemon, so a process that exits normally waits for the write.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._write: PendingWrite | None = None

    @property
    def step(self) -> int | None:
        """Step of the write that is in progress or not yet collected, or None if there is none."""
        return None if self._write is None else self._write.step

    @property
    def is_busy(self) -> bool:
        """Whether a background write is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, step: int, job: WriteJob, *, in_background: bool, start: float) -> None:
        """Run `job`, and measure its duration from the time `start`. The previous write must have been collected."""
        assert self._write is None, "one write at a time"
        write = self._write = PendingWrite(step=step, is_background=in_background)
        if not in_background:
            _run(write, job, start)
            return
        args = (write, job, start)
        self._thread = threading.Thread(target=_run_in_background, args=args, name="whet-checkpoint", daemon=False)
        self._thread.start()

    def collect(self, *, wait: bool) -> PendingWrite | None:
        """Return the result of the last write, once.

        Return None if there is no uncollected write, or if it is still in progress and `wait` is False.
        """
        if self._write is None or (self.is_busy and not wait):
            return None
        if self._thread is not None:
            self._thread.join()
        write, self._write, self._thread = self._write, None, None
        return write


def _run_in_background(write: PendingWrite, job: WriteJob, start: float) -> None:
    # Linux has a priority per thread. On other systems, this would fail or apply to the whole process.
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


# --- staging ---------------------------------------------------------------------------------------------------------

FREE_MEMORY_FACTOR = 1.5
"""A buffer is allocated only if the free memory is at least this many times its size."""


class StagingBuffer:
    """A host buffer for a copy of the state.

    The buffer is reused, because writing to memory that is already mapped is 10 times faster.
    """

    def __init__(self, device: AbstractDevice) -> None:
        self._device = device
        self._buffer: Tensor | None = None

    def has_capacity(self, num_bytes: int) -> bool:
        """Return whether there is memory for a copy of the state.

        Always False if the device shares the host's memory.
        """
        if self._device.memory.is_shared_with_host:
            return False
        if self._buffer is not None and self._buffer.numel() == num_bytes:
            return True
        # The memory limit of a container may be below that of the machine.
        free = linux.min_known(psutil.virtual_memory().available, linux.read_cgroup_limits().memory_left_bytes)
        return free is not None and free >= FREE_MEMORY_FACTOR * num_bytes

    @torch.no_grad()
    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Copy the snapshot into the buffer and return the copy, so that training can continue.

        The next call overwrites it.
        """
        layout = layout_tensors(snapshot.tensors)
        if self._buffer is None or self._buffer.numel() != layout.num_bytes:
            # Free the old buffer before allocating the new one.
            self._buffer = None
            self._buffer = self._device.memory.host_buffer(layout.num_bytes)
        staged: dict[str, Tensor] = {}
        for name, slot in layout.slots.items():
            target = self._buffer[slot.start : slot.end]
            staged[name] = target.view(slot.dtype).view(slot.shape) if len(target) else snapshot.tensors[name].cpu()
            staged[name].copy_(snapshot.tensors[name].detach(), non_blocking=True)
        # The copies are asynchronous. They must complete before the next step changes the tensors.
        self._device.sync()
        return dataclasses.replace(snapshot, tensors=staged)


# --- retention -------------------------------------------------------------------------------------------------------

MILESTONE_SHARE = 0.1
"""Fraction of the run between milestones. A milestone is the first checkpoint in each tenth of the run."""
MAX_MILESTONES = 2
"""Number of milestones to keep. With the last two checkpoints and the best one, at most five are on disk."""
MIN_MILESTONE_STEPS = 100
"""Minimum length of a run with milestones. A shorter run can be restarted instead."""


def milestones(steps: list[int], *, total_steps: int | None) -> list[int]:
    """Return the newest milestones among `steps`, or none if the length of the run is unknown.

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
    rejected: Container[int] = (),
) -> list[int]:
    """Remove old checkpoints and return their steps.

    The last `keep` checkpoints, the milestones, the best checkpoint, and `acknowledged`, which has just been written,
    are kept. If `acknowledged` is incomplete, nothing is removed, so that the only valid checkpoint is never lost.
    Damaged folders do not count among the last `keep`. Neither do the steps in `rejected`, which failed verification
    although their file sizes are correct. Folders newer than `acknowledged` are damaged, because the run resumed from
    an earlier step.
    """
    try:
        store.check_sizes(folder / store.checkpoint_name(acknowledged))
    except WhetError:
        return []
    steps = store.list_steps(folder)
    # Checking sizes is enough here: reading every byte of every checkpoint would take too long.
    whole = [s for s in steps if s <= acknowledged and s not in rejected and _is_whole(folder, s)]
    kept = {*whole[-keep:], *milestones(whole, total_steps=total_steps), best, acknowledged}
    removed = [step for step in steps if step not in kept]
    for step in removed:
        durable.remove(folder / store.checkpoint_name(step))
    return removed


def free_disk_space(
    folder: Path, *, num_bytes: int, keep: int, best: int | None, rejected: Container[int] = ()
) -> None:
    """Remove milestones before a write if the disk lacks space for two more checkpoints plus 5 %."""
    free = durable.free_bytes(folder)
    if free is None or free >= 2 * num_bytes * 1.05:
        return
    whole = [step for step in store.list_steps(folder) if step not in rejected and _is_whole(folder, step)]
    for step in whole[:-keep]:
        if step != best:
            durable.remove(folder / store.checkpoint_name(step))


def _is_whole(folder: Path, step: int) -> bool:
    try:
        store.check_sizes(folder / store.checkpoint_name(step))
    except DamagedCheckpointError:
        return False
    except WhetError:
        # The checkpoint has another format, or the disk is unreadable. Do not remove it.
        return True
    return True
