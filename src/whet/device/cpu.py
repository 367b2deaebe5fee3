"""The CPU: always there, always in step with us."""

from typing import final

import psutil
import torch
from torch import Tensor

from whet.device.abstract import AbstractDevice, Memory


@final
class Cpu(AbstractDevice):
    kind = "cpu"

    @property
    def place(self) -> torch.device:
        return torch.device("cpu")

    def put(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device.type == "cpu" else tensor.cpu()

    def memory(self) -> Memory:
        process = psutil.Process().memory_info()
        return Memory(allocated=process.rss, limit=psutil.virtual_memory().total)
