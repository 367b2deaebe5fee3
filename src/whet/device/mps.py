"""Apple GPUs through MPS. Written from PyTorch's sources; never run on a real Mac."""

from typing import final

import torch
from torch import Tensor

from whet.device.abstract import AbstractDevice, Memory
from whet.device.environment import before_first_allocation


@final
class Mps(AbstractDevice):
    kind = "mps"

    def __init__(self) -> None:
        before_first_allocation()

    @property
    def place(self) -> torch.device:
        return torch.device("mps")

    @property
    def lr_dtype(self) -> torch.dtype:
        # Metal has no float64.
        return torch.float32

    @property
    def shares_host_memory(self) -> bool:
        return True

    def sync(self) -> None:
        torch.mps.synchronize()

    def mark(self) -> torch.mps.Event:
        event = torch.mps.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, start: torch.mps.Event, end: torch.mps.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

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
