"""Let a loop run a commanded number of steps, and report how long they took."""

import json
import os
import resource
import sys
import time
from typing import Any, TextIO

import torch
from torch import Tensor


class StepGate:
    """Called after every step; blocks the loop when its steps are done, until the next command arrives."""

    def __init__(
        self, device: str, *, records_losses: bool, orders: TextIO, answers: TextIO, first_losses: int = 0
    ) -> None:
        self._device, self._orders, self._answers = device, orders, answers
        self._records_losses, self._first_losses = records_losses, first_losses
        self._losses: list[Tensor] = []
        self._left, self._asked, self._began, self._peak = 1, 1, 0.0, 0
        self.made: dict[str, Any] = {}
        """Facts about the workload."""
        self.notes: dict[str, Any] = {}
        """Facts about the loop, such as its plan, sent with every answer."""

    def begin(self) -> None:
        """Report that everything is built, and wait for the first command; nothing before is timed."""
        self.answer(**self.made)
        self._order()
        self._begin(1)

    def step(self, loss: Tensor | None = None) -> None:
        """Count an optimizer step."""
        if self._records_losses:
            if loss is not None:
                self._losses.append(loss.detach())
            return
        if loss is not None and len(self._losses) < self._first_losses:
            # A copy: a captured step writes its next loss to the same place.
            self._losses.append(loss.detach().clone())
        self._left -= 1
        if self._left == 0:
            self._sync()
            seconds = time.perf_counter() - self._began
            held, used = self._memory()
            self._peak = max(self._peak, used)
            if len(self._losses) == self._first_losses > 0:
                self.notes["losses"] = [float(loss) for loss in self._losses]
            self.answer(steps=self._asked, seconds=seconds, held=held, used=used, peak=self._peak, notes=self.notes)
            self._begin(self._order()["steps"])

    def end(self, losses: list[float] | None = None) -> None:
        """Report the losses at the end of the loop."""
        recorded = losses if losses is not None else [float(loss) for loss in self._losses]
        self.answer(losses=recorded, notes=self.notes)

    def answer(self, **fields: Any) -> None:
        print(json.dumps(fields), file=self._answers, flush=True)

    def _memory(self) -> tuple[int, int]:
        """Return peak memory: reserved by the process, and used by tensors; on CUDA since the last call."""
        if self._device == "cuda":
            memory = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()  # noqa: TID251
            torch.cuda.reset_peak_memory_stats()  # noqa: TID251
            return memory
        if self._device == "mps":
            return torch.mps.driver_allocated_memory(), torch.mps.current_allocated_memory()  # noqa: TID251
        whole = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return whole, whole

    def _order(self) -> dict[str, Any]:
        line = self._orders.readline()
        if not line.strip():
            # The parent closed the pipe. Framework loops have no clean way out from here.
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
