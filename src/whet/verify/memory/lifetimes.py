"""Track which storages are alive at each operator of a step."""

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

ScratchFunction = Callable[[Any, tuple[Any, ...], Any], int]
"""Bytes that a kernel takes beside its outputs and gives back when it is done, from the operator, inputs, outputs."""


@dataclass(slots=True)
class StorageLifetime:
    num_bytes: int
    born: int
    label: str
    died: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveBytes:
    """What was alive at each operator of one step, in bytes: a row for each label."""

    live: dict[str, np.ndarray]
    num_moments: int

    def row(self, label: str) -> np.ndarray:
        """The bytes of one label at each operator."""
        row = self.live.get(label)
        return np.zeros(self.num_moments) if row is None else row.astype(np.float64)


@dataclass(slots=True)
class _StorageLog:
    """What is written down; apart from the mode, so that storages that outlive it do not hold the mode."""

    now: int = 0
    lives: list[StorageLifetime] = field(default_factory=list)
    alive: dict[int, tuple[weakref.ref[Any], StorageLifetime]] = field(default_factory=dict)
    scratch: dict[int, int] = field(default_factory=dict)


class StorageTracker(TorchDispatchMode):
    """While entered, each operator is one moment, and each new storage is followed until it is freed."""

    def __init__(self, *, granule: int, scratch: ScratchFunction, answers: FakeExecutor) -> None:
        super().__init__()
        self._granule = granule
        self._scratch = scratch
        self._answers = answers
        self._ledger = _StorageLog()
        self.label = "activations"
        """What a storage is called that is born now."""

    @property
    def now(self) -> int:
        """The last operator's number."""
        return self._ledger.now

    def rounded(self, num_bytes: int) -> int:
        """As the allocator hands it out."""
        return -(-num_bytes // self._granule) * self._granule

    def follow(self, tensors: Iterable[Tensor], *, label: str) -> None:
        """Follows these too, or gives those that are followed another name."""
        for tensor in tensors:
            self._follow(tensor, label).label = label

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return getattr(args[0], "fake_device", None) or func(*args)
        self._ledger.now += 1
        out = self._answers.call(func, args, kwargs or {})
        taken = self._scratch(func, args, out)
        if taken:
            self._ledger.scratch[self._ledger.now] = taken
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._follow(leaf, self.label)
        return out

    def window(self, start: int, end: int) -> LiveBytes:
        """What was alive at the operators after moment `start`, up to moment `end`."""
        changes: dict[str, np.ndarray] = {}
        for life in self._ledger.lives:
            died = end if life.died is None else min(life.died, end)
            born = max(life.born, start + 1)
            if died < born:
                continue
            change = changes.setdefault(life.label, np.zeros(end - start + 1, dtype=np.int64))
            change[born - start - 1] += life.num_bytes
            change[died - start] -= life.num_bytes
        live = {label: np.cumsum(change)[:-1] for label, change in changes.items()}
        extra = np.zeros(end - start, dtype=np.int64)
        for moment, num_bytes in self._ledger.scratch.items():
            if start < moment <= end:
                extra[moment - start - 1] += num_bytes
        live["temporary"] = live.get("temporary", 0) + extra
        return LiveBytes(live=live, num_moments=end - start)

    def _follow(self, tensor: Tensor, label: str) -> StorageLifetime:
        # Past the modes that watch functions: each would be asked about every tensor.
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._ledger.alive.get(key)
        if known is not None:
            return known[1]
        ledger = self._ledger
        life = StorageLifetime(num_bytes=self.rounded(storage.nbytes()), born=ledger.now, label=label)
        ledger.lives.append(life)

        def end(_: Any) -> None:
            life.died = ledger.now
            if ledger.alive.get(key, (None, None))[1] is life:
                del ledger.alive[key]

        ledger.alive[key] = (weakref.ref(storage, end), life)
        return life


_MB = 1024**2

FIXED_SCRATCH_BYTES = {"cuda": 64 * _MB, "mps": 0, "cpu": 0}
"""cuBLAS keeps a workspace for each thread and stream that multiplied: 32 MiB on Hopper (8 before) for the forward
pass and as much for autograd's own thread. torch takes them from its allocator, so they count as allocated."""

_MADE_CONTIGUOUS = {"aten::native_layer_norm": 0, "aten::native_layer_norm_backward": 1}
"""Operators that copy an input, at this place, if it does not lie in one row."""


def scratch_function(device: str) -> ScratchFunction:
    """The rule of one device."""
    return _on_cuda if device == "cuda" else _none


def _none(func: Any, args: tuple[Any, ...], out: Any) -> int:  # noqa: ARG001
    return 0


def _on_cuda(func: Any, args: tuple[Any, ...], out: Any) -> int:  # noqa: ARG001
    name = func.name()
    if name == "aten::_scaled_dot_product_flash_attention_backward":
        # The gradient of the queries is summed in float32; and one number a row.
        return int(args[1].numel() * 4 + args[1].numel() // args[1].shape[-1] * 4)
    if name == "aten::_scaled_dot_product_efficient_attention_backward":
        query = args[1]
        rows = query.numel() // query.shape[-1]
        return int(rows * 4 + (0 if query.element_size() == 4 else query.numel() * 4))
    if name in _MADE_CONTIGUOUS:
        given = args[_MADE_CONTIGUOUS[name]]
        return 0 if given.is_contiguous() else int(given.nbytes)
    if name == "aten::embedding_dense_backward":
        # Indices are sorted with their places: both twice, and what the sort needs.
        return int(args[1].numel() * 8 * 5)
    return 0
