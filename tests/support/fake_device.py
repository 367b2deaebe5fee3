"""A device for tests, with CPU tensors, a manual clock, a memory limit and simulated graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whet.base.units import GB
from whet.device.abstract import (
    AbstractDevice,
    AbstractGraphs,
    AbstractReader,
    DeviceMemory,
    Made,
    Mark,
    MemoryUsage,
    Replay,
)

SYNC_OPERATORS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "equal",
    "unique_consecutive",
    "_unique2",
)
"""Operators for whose results the host waits."""

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[Tensor]]
"""An operator, its positional and keyword arguments, and the tensors that it created."""


@final
class FakeDevice(AbstractDevice):
    """A device that computes on the CPU, and raises the out-of-memory error of MPS at its memory limit."""

    kind = "fake"

    def __init__(self, *, limit_bytes: int = 8 * GB, reader: "FakeReader | None" = None) -> None:
        super().__init__()
        self.seconds = 0.0
        self._reader = reader
        self.memory: FakeMemory = FakeMemory(limit_bytes)
        self._generator = torch.Generator()

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def generator(self) -> torch.Generator:
        return self._generator

    def pass_time(self, seconds: float) -> None:
        self.seconds += seconds

    def mark(self) -> float:
        return self.seconds

    def reader(self) -> "FakeReader | None":
        return self._reader

    def graphs(self) -> "SimulatedGraphs":
        return SimulatedGraphs()


@final
class FakeReader(AbstractReader):
    """A reader of a device that is behind the host: it has finished its work up to `reached`."""

    def __init__(self) -> None:
        self.reached = 0.0
        self.waited_for: list[float] = []

    def has_reached(self, mark: Mark) -> bool:
        return mark <= self.reached

    @contextmanager
    def after(self, mark: Mark) -> Iterator[None]:
        if mark > self.reached:
            self.waited_for.append(mark)
            self.reached = mark
        yield


@final
class FakeMemory(DeviceMemory):
    """Simulated device memory with a limit, which is counted but not allocated."""

    def __init__(self, limit_bytes: int) -> None:
        self._held_bytes = self._peak_bytes = 0
        self._limit_bytes = limit_bytes

    def hold(self, num_bytes: int) -> None:
        """Count the bytes of an allocation. Above the limit, raise the out-of-memory error of MPS."""
        if self._held_bytes + num_bytes > self._limit_bytes:
            raise RuntimeError(
                f"MPS backend out of memory (MPS allocated: {self._held_bytes / GB:.2f} GiB, "
                f"other allocations: 0 bytes, max allowed: {self._limit_bytes / GB:.2f} GiB). Tried to allocate "
                f"{num_bytes / GB:.2f} GiB on shared pool. "
                "Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations "
                "(may cause system failure)."
            )
        self._held_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self._held_bytes)

    def release(self, num_bytes: int) -> None:
        self._held_bytes -= num_bytes

    def usage(self) -> MemoryUsage:
        return MemoryUsage(
            allocated=self._held_bytes, reserved=self._held_bytes, peak=self._peak_bytes, limit=self._limit_bytes
        )


# --- graphs ----------------------------------------------------------------------------------------------------------


@final
class SimulatedGraphs(AbstractGraphs):
    """Simulates CUDA graphs on the CPU. It records operators while they run, undoes them, and replays them later.

    As with CUDA, a replay executes no Python code and uses the same memory. Therefore values computed on the host stay
    constant, and a tensor that replaces another one after the recording has no effect. Operators that synchronize
    cannot be captured.
    """

    @contextmanager
    def warm_up(self) -> Iterator[list[str]]:
        with _SyncRecorder() as recorder:
            yield recorder.syncs

    def capture(self, work: Callable[[], Made]) -> tuple[Replay, Made]:
        rng_state = torch.get_rng_state()
        recording = _GraphRecording()
        try:
            with recording:
                made = work()
        finally:
            recording.undo()
            torch.set_rng_state(rng_state)
        return recording.replay, made

    def forget(self) -> None:
        """Do nothing, because each recording has its own memory."""


class _SyncRecorder(TorchDispatchMode):
    """Records the names of operators that would synchronize with a real device."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_sync(func, args):
            self.syncs.append(_name(func))
        return func(*args, **(kwargs or {}))


class _GraphRecording(TorchDispatchMode):
    """Records operators while they run, and can undo and replay them."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Call] = []
        self._created: dict[int, Any] = {}
        """Storages created during the capture, kept alive so that their addresses are not reused."""
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        """Views of older storages that the capture wrote to, and copies of their original values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_sync(func, args):
            raise RuntimeError(f"operation not permitted when stream is capturing (simulated): {_name(func)}")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # batch_norm updates its running statistics, although its schema does not declare it.
        for tensor in given if func._schema.is_mutable or "batch_norm" in _name(func) else ():
            self._save(tensor)
        result = func(*args, **kwargs)
        inputs = {_storage(tensor) for tensor in given}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and _storage(leaf) not in inputs]
        self._created |= {_storage(tensor): tensor.untyped_storage() for tensor in made}
        self._calls.append((func, args, kwargs, made))
        return result

    def _save(self, tensor: Tensor) -> None:
        storage = _storage(tensor)
        if storage not in self._created and storage not in self._before:
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
            created = [tensor for tensor in fresh if _storage(tensor) not in inputs]
            for old, new in zip(made, created, strict=True):
                old.detach().copy_(new)


def _is_sync(func: Any, args: Any) -> bool:
    """Return whether the host waits for the operator. Indexing with a mask waits, because the mask gives the size."""
    name = _name(func)
    if name in ("index", "index_put", "index_put_"):
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return name in SYNC_OPERATORS


def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
