"""A device for tests: CPU tensors, a manual clock, a memory limit and simulated graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whet.base.units import GB
from whet.device.abstract import AbstractDevice, AbstractGraphs, Made, MemoryUsage, Replay

SYNC_OPERATORS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "equal",
    "unique_consecutive",
    "_unique2",
)
"""Operators whose result the host needs before it can go on."""

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[Tensor]]
"""An operator, what it was called with, and what it made."""


@final
class SimulatedGraphs(AbstractGraphs):
    @contextmanager
    def warm_up(self) -> Iterator[list[str]]:
        with _SyncRecorder() as watch:
            yield watch.waits

    def capture(self, work: Callable[[], Made]) -> tuple[Replay, Made]:
        generator = torch.get_rng_state()
        recording = _GraphRecording()
        try:
            with recording:
                made = work()
        finally:
            recording.undo()
            torch.set_rng_state(generator)
        return recording.replay, made

    def forget(self) -> None:
        """Each recording keeps its own."""


class _SyncRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_sync(func, args):
            self.waits.append(_name(func))
        return func(*args, **(kwargs or {}))


class _GraphRecording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Call] = []
        self._own: dict[int, Any] = {}
        """Storages that were made meanwhile; kept, so that no other gets their address."""
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        """What was there before and has been written to, with its first values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_sync(func, args):
            raise RuntimeError(f"operation not permitted when stream is capturing (simulated): {_name(func)}")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # Statistics of a norm are written to although the schema does not say so.
        for tensor in given if func._schema.is_mutable or "batch_norm" in _name(func) else ():
            self._keep(tensor)
        result = func(*args, **kwargs)
        inputs = {_storage(tensor) for tensor in given}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and _storage(leaf) not in inputs]
        self._own |= {_storage(tensor): tensor.untyped_storage() for tensor in made}
        self._calls.append((func, args, kwargs, made))
        return result

    def _keep(self, tensor: Tensor) -> None:
        storage = _storage(tensor)
        if storage not in self._own and storage not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._before[storage] = whole, whole.clone()

    def undo(self) -> None:
        for tensor, values in self._before.values():
            tensor.copy_(values)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, made in self._calls:
            fresh = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            inputs = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            others = [tensor for tensor in fresh if _storage(tensor) not in inputs]
            for old, new in zip(made, others, strict=True):
                old.detach().copy_(new)


def _is_sync(func: Any, args: Any) -> bool:
    """Whether the host needs the values: indexing by a mask makes as many rows as are true."""
    name = _name(func)
    if name in ("index", "index_put", "index_put_"):
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return name in SYNC_OPERATORS


def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@final
class FakeDevice(AbstractDevice):
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

    def memory(self) -> MemoryUsage:
        return MemoryUsage(
            allocated=self.held_bytes, reserved=self.held_bytes, peak=self.peak_bytes, limit=self._limit_bytes
        )

    def graphs(self) -> SimulatedGraphs:
        return SimulatedGraphs()

    def rng_state(self) -> Tensor:
        return self._generator.get_state()

    def set_rng_state(self, state: Tensor) -> None:
        self._generator.set_state(state)
