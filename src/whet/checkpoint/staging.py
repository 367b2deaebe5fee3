"""Where does the state wait while it is written? In one buffer on the host, made once and used for every save."""

import dataclasses

import psutil
import torch
from torch import Tensor

from whet.checkpoint.layout import plan_layout
from whet.checkpoint.snapshot import Snapshot
from whet.device.abstract import AbstractDevice
from whet.machine import cgroup

NEEDED_SHARE = 1.5
"""A buffer is made only where this many times its size is free."""


class Staging:
    """A copy of the newest state, laid out as in the file. Filling a used buffer is 10 times faster than a new one."""

    def __init__(self, device: AbstractDevice) -> None:
        self._device = device
        self._buffer: Tensor | None = None

    def has_room(self, num_bytes: int) -> bool:
        """Whether the state may lie in memory twice: never where the device shares the host's memory."""
        if self._device.shares_host_memory:
            return False
        if self._buffer is not None and self._buffer.numel() == num_bytes:
            return True
        # A container may be allowed less than the machine has.
        free = cgroup.smaller(psutil.virtual_memory().available, cgroup.read_limits().memory_left_bytes)
        return free is not None and free >= NEEDED_SHARE * num_bytes

    @torch.no_grad()
    def copy(self, snapshot: Snapshot) -> Snapshot:
        """The same state in the buffer; training may go on when this returns. The copy lasts until the next one."""
        layout = plan_layout(snapshot.tensors)
        if self._buffer is None or self._buffer.numel() != layout.num_bytes:
            self._buffer = None
            self._buffer = self._device.host_buffer(layout.num_bytes)
        staged: dict[str, Tensor] = {}
        for name, place in layout.places.items():
            room = self._buffer[place.start : place.end]
            staged[name] = room.view(place.dtype).view(place.shape) if len(room) else snapshot.tensors[name].cpu()
            staged[name].copy_(snapshot.tensors[name].detach(), non_blocking=True)
        self._device.sync()
        return dataclasses.replace(snapshot, tensors=staged)
