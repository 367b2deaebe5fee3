"""How far may a loop go before it waits? Its process makes as many steps as it is told, and says how long they took."""

import json
import os
import resource
import sys
import time
from typing import Any, TextIO

import torch
from torch import Tensor


class Pace:
    """Is told of every step; lets the loop go on, or keeps it until the next order comes."""

    def __init__(self, device: str, *, takes_losses: bool, orders: TextIO, answers: TextIO) -> None:
        self._device, self._orders, self._answers = device, orders, answers
        self._takes_losses = takes_losses
        self._losses: list[Tensor] = []
        self._left, self._asked, self._began = 1, 1, 0.0
        self.made: dict[str, Any] = {}
        """What the work is."""
        self.notes: dict[str, Any] = {}
        """What a way has to say of itself: told with the first step."""

    def begin(self) -> None:
        """Says that all is made, and waits for the order to begin: nothing before is timed."""
        self.answer(**self.made)
        self._order()
        self._begin(1)

    def step(self, loss: Tensor | None = None) -> None:
        """One optimizer step was made."""
        if self._takes_losses:
            if loss is not None:
                self._losses.append(loss.detach())
            return
        self._left -= 1
        if self._left == 0:
            self._sync()
            seconds = time.perf_counter() - self._began
            held, used = self._memory()
            self.answer(steps=self._asked, seconds=seconds, held=held, used=used, notes=self.notes)
            self._begin(self._order()["steps"])

    def end(self, losses: list[float] | None = None) -> None:
        """The loop came to its end: only where losses are taken."""
        found = losses if losses is not None else [float(loss) for loss in self._losses]
        self.answer(losses=found, notes=self.notes)

    def answer(self, **fields: Any) -> None:
        print(json.dumps(fields), file=self._answers, flush=True)

    def _memory(self) -> tuple[int, int]:
        """The most that the device kept for this process, and the most that tensors took of it."""
        if self._device == "cuda":
            return torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()  # noqa: TID251
        if self._device == "mps":
            return torch.mps.driver_allocated_memory(), torch.mps.current_allocated_memory()  # noqa: TID251
        whole = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return whole, whole

    def _order(self) -> dict[str, Any]:
        line = self._orders.readline()
        if not line.strip():
            # Nobody wants more; loops of others cannot be left politely.
            os._exit(0)
        return dict(json.loads(line))

    def _begin(self, steps: int) -> None:
        self._left = self._asked = steps
        self._began = time.perf_counter()

    def _sync(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()  # noqa: TID251
        elif self._device == "mps":
            torch.mps.synchronize()  # noqa: TID251
