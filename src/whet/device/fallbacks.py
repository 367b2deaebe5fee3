"""Which operators ran on the CPU because MPS lacks them, and what did that cost? Timed in a run's first steps.

Which ones MPS lacks is read from the list that comes with the installed torch. Never run on a real Mac.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whet.base.units import show_seconds
from whet.device.mps_operators import operators_of_torch, status_of


@dataclass
class _Cost:
    calls: int = 0
    seconds: float = 0.0


class FallbackTimer:
    """Times the operators that fall back, during the first `num_steps` steps; each costs two waits for the GPU more."""

    def __init__(self, *, num_steps: int = 2, sync: Callable[[], None]) -> None:
        self._num_steps = num_steps
        self._steps_done = 0
        self._mode = _Timing(sync)

    @contextmanager
    def during_step(self) -> Iterator[None]:
        """Around one optimizer step."""
        if self._steps_done >= self._num_steps:
            yield
            return
        with self._mode:
            yield
        self._steps_done += 1

    def result(self) -> dict[str, Any] | None:
        """What fell back, by name, as calls and seconds of one step; None before the steps are done, or if nothing."""
        if self._steps_done < self._num_steps or not self._mode.costs:
            return None
        steps = self._steps_done
        dearest = sorted(self._mode.costs.items(), key=lambda item: -item[1].seconds)
        told = [
            f"{name} {cost.calls / steps:g} calls a step, {_show_short(cost.seconds / steps)} a step"
            for name, cost in dearest
        ]
        return {
            "operators": {n: {"calls": c.calls / steps, "seconds": c.seconds / steps} for n, c in dearest},
            "reason": f"fell back to the CPU: {'; '.join(told)} (the mean of {steps} steps)",
        }


def _show_short(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else show_seconds(seconds)


class _Timing(TorchDispatchMode):
    def __init__(self, sync: Callable[[], None]) -> None:
        super().__init__()
        self.costs: dict[str, _Cost] = {}
        self._sync = sync

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if not (falls_back(name) and _is_on_mps((args, kwargs))):
            return func(*args, **(kwargs or {}))
        self._sync()
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self._sync()
        cost = self.costs.setdefault(name, _Cost())
        cost.calls += 1
        cost.seconds += time.perf_counter() - start
        return result


def falls_back(name: str) -> bool:
    """Whether an operator ("aten::x.out") has no way to run on MPS itself, by the dispatcher's own order."""
    space, _, name = name.partition("::")
    if space != "aten":
        return False
    status = status_of(name, operators_of_torch())
    if status.way == "CompositeExplicitAutograd":
        # It has a way of its own, which for x is that of x_, if there is one.
        base, dot, overload = name.partition(".")
        return falls_back(f"aten::{base}_{dot}{overload}")
    return status.kind in ("missing", "on the CPU")


def _is_on_mps(arguments: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.device.type == "mps" for leaf in tree_leaves(arguments))
