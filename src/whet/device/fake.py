"""A device that is not there, for tests: CPU tensors, a clock that moves only when told, a memory ceiling."""

from typing import final

import torch
from torch import Tensor

from whet.base.units import GB
from whet.device.abstract import AbstractDevice, Memory
from whet.device.simulated_graphs import SimulatedGraphs


@final
class Fake(AbstractDevice):
    """Simulated: computes on the CPU and pretends to be an Apple GPU when memory runs out."""

    kind = "fake"

    def __init__(self, *, limit_bytes: int = 8 * GB) -> None:
        self.seconds = 0.0
        self.held_bytes = 0
        self.peak_bytes = 0
        self._limit_bytes = limit_bytes
        self._generator = torch.Generator()

    @property
    def place(self) -> torch.device:
        return torch.device("cpu")

    def pass_time(self, seconds: float) -> None:
        """Moves the clock."""
        self.seconds += seconds

    def hold(self, num_bytes: int) -> None:
        """Takes memory, or raises MPS's own error when the ceiling is reached."""
        if self.held_bytes + num_bytes > self._limit_bytes:
            raise RuntimeError(
                f"MPS backend out of memory (MPS allocated: {self.held_bytes / GB:.2f} GiB, "
                f"other allocations: 0 bytes, max allowed: {self._limit_bytes / GB:.2f} GiB). Tried to allocate "
                f"{num_bytes / GB:.2f} GiB on shared pool. "
                "Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations "
                "(may cause system failure)."
            )
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def release(self, num_bytes: int) -> None:
        """Gives memory back."""
        self.held_bytes -= num_bytes

    def mark(self) -> float:
        return self.seconds

    def memory(self) -> Memory:
        return Memory(
            allocated=self.held_bytes, reserved=self.held_bytes, peak=self.peak_bytes, limit=self._limit_bytes
        )

    def graphs(self) -> SimulatedGraphs:
        return SimulatedGraphs()

    def rng_state(self) -> Tensor:
        return self._generator.get_state()

    def set_rng_state(self, state: Tensor) -> None:
        self._generator.set_state(state)
