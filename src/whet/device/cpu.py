"""The CPU: always there, always in step with us."""

import contextlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import final

import psutil
import torch
from torch import Tensor

from whet.device.abstract import AbstractDevice, Memory
from whet.device.heap import give_back, kept_heap


@final
class Cpu(AbstractDevice):
    kind = "cpu"
    attention_kernels = ("flash", "math")

    @property
    def place(self) -> torch.device:
        return torch.device("cpu")

    def put(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device.type == "cpu" else tensor.cpu()

    def memory(self) -> Memory:
        process = psutil.Process().memory_info()
        return Memory(allocated=process.rss, peak=_peak_of_process(), limit=psutil.virtual_memory().total)

    def freed_memory(self, what: str) -> AbstractContextManager[object]:
        return kept_heap() if what == "kept" else contextlib.nullcontext()

    def empty_cache(self) -> None:
        give_back()

    def reset_peak(self) -> None:
        # What earlier work has freed and the C library keeps would count as this one's.
        give_back()
        # Linux counts a process's peak anew after this; other systems have no such counter.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def _peak_of_process() -> int | None:
    """The most memory this process had since the peak was reset; None where nobody counts."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("VmHWM:")), None)
    return None if found is None else int(found.split()[1]) * 1024
