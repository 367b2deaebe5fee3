"""Track the storages that are alive at each operator of a step."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whet.verify.fake_tensors import FakeExecutor

# Maps an operator, its inputs and its outputs to the bytes of temporary memory that its kernel allocates.
ScratchFunction = Callable[[Any, tuple[Any, ...], Any], int]


@dataclass(slots=True)
class StorageLifetime:
    """The size and the lifetime of a storage, in operator counts."""

    num_bytes: int
    born: int
    label: str
    died: int | None = None
    """Number of the last operator before the storage was freed, or None if it is alive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveBytes:
    """The bytes that are alive at each operator of one step, by label."""

    live: dict[str, np.ndarray]
    num_operators: int

    def row(self, label: str) -> np.ndarray:
        """Return the live bytes of one label at each operator, (operators,). They are 0 for an unknown label."""
        row = self.live.get(label)
        return np.zeros(self.num_operators) if row is None else row.astype(np.float64)


@dataclass(slots=True)
class _StorageLog:
    """All recorded lifetimes.

    This object is separate from the mode, so that storages that outlive the mode do not keep it alive.
    """

    now: int = 0
    lifetimes: list[StorageLifetime] = field(default_factory=list)
    alive: dict[int, tuple[weakref.ref[Any], StorageLifetime]] = field(default_factory=dict)
    scratch: dict[int, int] = field(default_factory=dict)


class StorageTracker(TorchDispatchMode):
    """Records when each storage, fake or real, is allocated and freed. Time is counted in operators."""

    def __init__(self, *, granularity: int, scratch: ScratchFunction, executor: FakeExecutor) -> None:
        super().__init__()
        self._granularity = granularity
        self._scratch = scratch
        self._executor = executor
        self._log = _StorageLog()
        self.label = "activations"
        """Label of the storages that are allocated from now on."""

    @property
    def now(self) -> int:
        """The current time: the number of operators executed so far."""
        return self._log.now

    def follow(self, tensors: Iterable[Tensor], *, label: str) -> None:
        """Track the storages of these tensors, or change their label if they are already tracked."""
        for tensor in tensors:
            self._follow(tensor, label).label = label

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return getattr(args[0], "fake_device", None) or func(*args)
        self._log.now += 1
        out = self._executor.run_operator(func, args, kwargs or {})
        scratch_bytes = self._scratch(func, args, out)
        if scratch_bytes:
            self._log.scratch[self._log.now] = scratch_bytes
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._follow(leaf, self.label)
        return out

    def live_bytes(self, start: int, end: int) -> LiveBytes:
        """Return the live bytes at the operators after number `start`, up to and including `end`."""
        changes: dict[str, np.ndarray] = {}
        for lifetime in self._log.lifetimes:
            died = end if lifetime.died is None else min(lifetime.died, end)
            born = max(lifetime.born, start + 1)
            if died < born:
                continue
            change = changes.setdefault(lifetime.label, np.zeros(end - start + 1, dtype=np.int64))
            change[born - start - 1] += lifetime.num_bytes
            change[died - start] -= lifetime.num_bytes
        live = {label: np.cumsum(change)[:-1] for label, change in changes.items()}
        scratch = np.zeros(end - start, dtype=np.int64)
        for number, num_bytes in self._log.scratch.items():
            if start < number <= end:
                scratch[number - start - 1] += num_bytes
        live["temporary"] = live.get("temporary", 0) + scratch
        return LiveBytes(live=live, num_operators=end - start)

    def _follow(self, tensor: Tensor, label: str) -> StorageLifetime:
        # Bypass function modes, which would otherwise intercept this call for every tensor.
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._log.alive.get(key)
        if known is not None:
            return known[1]
        log = self._log
        # Allocators round up to their granularity.
        num_bytes = -(-storage.nbytes() // self._granularity) * self._granularity
        lifetime = StorageLifetime(num_bytes=num_bytes, born=log.now, label=label)
        log.lifetimes.append(lifetime)

        def freed(_: Any) -> None:
            lifetime.died = log.now
            if log.alive.get(key, (None, None))[1] is lifetime:
                del log.alive[key]

        log.alive[key] = (weakref.ref(storage, freed), lifetime)
        return lifetime


# --- scratch memory of kernels ----------------------------------------------------------------------------------------

_MB = 1024**2
# cuBLAS keeps a workspace per combination of thread and stream: 32 MiB on Hopper (8 MiB on older GPUs) for the forward
# pass, and as much for the autograd thread. torch allocates them, so they count as allocated memory.
FIXED_SCRATCH_BYTES = {"cuda": 64 * _MB, "mps": 0, "cpu": 0}
# Operators that copy an argument if it is not contiguous, and the position of that argument.
_COPIES_STRIDED_INPUT = {"aten::native_layer_norm": 0, "aten::native_layer_norm_backward": 1}


def scratch_function(device: str) -> ScratchFunction:
    """Return the function that computes the temporary memory of kernels on a type of device."""
    return _cuda_scratch if device == "cuda" else _no_scratch


def _no_scratch(func: Any, args: tuple[Any, ...], out: Any) -> int:  # noqa: ARG001
    return 0


def _cuda_scratch(func: Any, args: tuple[Any, ...], out: Any) -> int:  # noqa: ARG001
    name = func.name()
    if name == "aten::_scaled_dot_product_flash_attention_backward":
        # The kernel accumulates the gradient of the queries in float32, and needs one float per row.
        return int(args[1].numel() * 4 + args[1].numel() // args[1].shape[-1] * 4)
    if name == "aten::_scaled_dot_product_efficient_attention_backward":
        query = args[1]
        rows = query.numel() // query.shape[-1]
        return int(rows * 4 + (0 if query.element_size() == 4 else query.numel() * 4))
    if name in _COPIES_STRIDED_INPUT:
        tensor = args[_COPIES_STRIDED_INPUT[name]]
        return 0 if tensor.is_contiguous() else int(tensor.nbytes)
    if name == "aten::embedding_dense_backward":
        # The kernel sorts indices together with their positions: two copies of each, plus the memory of the sort.
        return int(args[1].numel() * 8 * 5)
    return 0
