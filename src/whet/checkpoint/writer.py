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

WriteJob = Callable[["PendingWrite"], None]
"""Writes one checkpoint and records the result; an exception means that there is none."""

_NICENESS = 10


@dataclass(kw_only=True, slots=True)
class PendingWrite:
    """A write in progress or finished."""

    step: int
    is_background: bool
    """Written by a thread while training continues."""
    num_bytes: int = 0
    cleanup_error: WhetError | None = None
    """Why old checkpoints could not be removed; the new one is safe."""
    seconds: float = 0.0
    """Time until it was safe or had failed, including the copy."""
    error: BaseException | None = None


class CheckpointWriter:
    """Runs one write at a time, in this thread or in the background; `collect` returns its result.

    The thread is not a daemon, so a process that exits normally waits for it.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._write: PendingWrite | None = None

    @property
    def step(self) -> int | None:
        """The step whose write is in progress or not collected yet."""
        return None if self._write is None else self._write.step

    @property
    def is_busy(self) -> bool:
        """Whether a background write is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, step: int, job: WriteJob, *, in_background: bool, start: float) -> None:
        """Run `job`; its time counts from `start`. The previous write must have been collected."""
        assert self._write is None, "one write at a time"
        write = self._write = PendingWrite(step=step, is_background=in_background)
        if not in_background:
            _run(write, job, start)
            return
        args = (write, job, start)
        self._thread = threading.Thread(target=_run_in_background, args=args, name="whet-checkpoint", daemon=False)
        self._thread.start()

    def collect(self, *, wait: bool) -> PendingWrite | None:
        """Return the last write once; None if there is none, or if it is in progress and `wait` is off."""
        if self._write is None or (self.is_busy and not wait):
            return None
        if self._thread is not None:
            self._thread.join()
        write, self._write, self._thread = self._write, None, None
        return write


def _run_in_background(write: PendingWrite, job: WriteJob, start: float) -> None:
    # On Linux threads have their own priority; elsewhere this would fail, or apply to the whole process.
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


# --- staging
# ------------------------------------------------------------------------------------------------------------

FREE_MEMORY_FACTOR = 1.5
"""A buffer is allocated only if this many times its size is free."""


class StagingBuffer:
    """A host copy of the newest state. Filling a used buffer is 10 times faster than a new one."""

    def __init__(self, device: AbstractDevice) -> None:
        self._device = device
        self._buffer: Tensor | None = None

    def has_room(self, num_bytes: int) -> bool:
        """Whether there is memory for a second copy of the state; never if the device shares the host's memory."""
        if self._device.memory.is_shared_with_host:
            return False
        if self._buffer is not None and self._buffer.numel() == num_bytes:
            return True
        # A container may have a lower limit than the machine.
        free = linux.min_known(psutil.virtual_memory().available, linux.read_cgroup_limits().memory_left_bytes)
        return free is not None and free >= FREE_MEMORY_FACTOR * num_bytes

    @torch.no_grad()
    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Copy the state into the buffer, so that training can continue. The next copy overwrites it."""
        layout = layout_tensors(snapshot.tensors)
        if self._buffer is None or self._buffer.numel() != layout.num_bytes:
            self._buffer = None
            self._buffer = self._device.memory.host_buffer(layout.num_bytes)
        staged: dict[str, Tensor] = {}
        for name, slot in layout.slots.items():
            target = self._buffer[slot.start : slot.end]
            staged[name] = target.view(slot.dtype).view(slot.shape) if len(target) else snapshot.tensors[name].cpu()
            staged[name].copy_(snapshot.tensors[name].detach(), non_blocking=True)
        self._device.sync()
        return dataclasses.replace(snapshot, tensors=staged)


# --- retention
# ----------------------------------------------------------------------------------------------------------

MILESTONE_SHARE = 0.1
"""A milestone is the first checkpoint in each tenth of the run."""
MAX_MILESTONES = 2
"""The newest milestones are kept: with the last two checkpoints and the best, at most five are on disk."""
MIN_MILESTONE_STEPS = 100
"""A shorter run is rather restarted than rolled back."""


def milestones(steps: list[int], *, total_steps: int | None) -> list[int]:
    """Return the newest milestones among steps; a run without a known end has none.

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
    """Remove checkpoints that are not kept, and return their steps. `acknowledged` has just been written.

    Nothing is removed unless that one is complete, so the only good checkpoint never is. Damaged folders do not count
    among the last `keep`, nor do those in `rejected`, which failed verification although their sizes are right. Newer
    ones than `acknowledged` must be damaged, since the run resumed from before them.
    """
    try:
        store.check_sizes(folder / store.checkpoint_name(acknowledged))
    except WhetError:
        return []
    steps = store.list_steps(folder)
    whole = [s for s in steps if s <= acknowledged and s not in rejected and _is_whole(folder, s)]
    kept = {*whole[-keep:], *milestones(whole, total_steps=total_steps), best, acknowledged}
    removed = [step for step in steps if step not in kept]
    for step in removed:
        durable.remove(folder / store.checkpoint_name(step))
    return removed


def free_disk_space(
    folder: Path, *, num_bytes: int, keep: int, best: int | None, rejected: Container[int] = ()
) -> None:
    """Remove milestones before a write if there is no space for two more checkpoints and 5 %."""
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
        return True  # Another format, or an unreadable disk: do not remove it.
    return True
