"""Apple GPUs through MPS. Written from PyTorch's sources; never run on a real Mac."""

from typing import final

import torch
from torch import Tensor

from whet.device.abstract import AbstractDevice, Mark, Memory


@final
class Mps(AbstractDevice):
    kind = "mps"

    def __init__(self) -> None:
        self._first_event = torch.mps.Event(enable_timing=True)
        self._first_event.record()

    @property
    def place(self) -> torch.device:
        return torch.device("mps")

    @property
    def lr_dtype(self) -> torch.dtype:
        # Metal has no float64.
        return torch.float32

    def sync(self) -> None:
        torch.mps.synchronize()

    def mark(self) -> Mark:
        event = torch.mps.Event(enable_timing=True)
        event.record()
        start = self._first_event

        def seconds() -> float:
            event.synchronize()
            return float(start.elapsed_time(event)) / 1000

        return seconds

    def memory(self) -> Memory:
        return Memory(
            allocated=torch.mps.current_allocated_memory(),
            reserved=torch.mps.driver_allocated_memory(),
            limit=torch.mps.recommended_max_memory(),
        )

    def empty_cache(self) -> None:
        torch.mps.empty_cache()

    def rng_state(self) -> Tensor:
        return torch.mps.get_rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        torch.mps.set_rng_state(state)


def why_not() -> str | None:
    """Why MPS cannot be used in this process; None when it can."""
    if torch.backends.mps.is_available():
        return None
    return "macOS 14 or newer is needed" if torch.backends.mps.is_built() else "this torch is built without MPS"
