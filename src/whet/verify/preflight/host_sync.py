"""Detect calls that synchronize with the device, and shapes that depend on data."""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whet.verify.preflight.findings import Detection, Detector, FunctionCall, OperatorCall


@dataclass(frozen=True, slots=True)
class HostRead:
    """A function that copies a value from the device to the host."""

    description: str
    only_to_cpu: bool = False
    """Whether the function reads only if "cpu" is an argument, because `.to(other.device)` may stay on the device."""

    def reads(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call with these arguments copies a value to the host."""
        return not self.only_to_cpu or "cpu" in [a for a in (*args[1:], *kwargs.values()) if isinstance(a, str)]


HOST_READS: dict[Any, HostRead] = {
    Tensor.item: HostRead(".item()"),
    Tensor.tolist: HostRead(".tolist()"),
    Tensor.__bool__: HostRead("the truth value of a tensor"),
    Tensor.__float__: HostRead("float() of a tensor"),
    Tensor.__int__: HostRead("int() of a tensor"),
    Tensor.__index__: HostRead("a tensor as a Python index"),
    Tensor.numpy: HostRead(".numpy()"),
    Tensor.__array__: HostRead("a NumPy array of a tensor"),
    Tensor.cpu: HostRead(".cpu()"),
    Tensor.to: HostRead('.to("cpu")', only_to_cpu=True),
    torch.equal: HostRead("torch.equal()"),
    torch.allclose: HostRead("torch.allclose()"),
}


class HostTensors:
    """The set of tensors that would be in host memory. This must be recorded, because a trace has only one device."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[Tensor]] = {}

    def add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._refs[id(tensor)] = weakref.ref(tensor)

    def remove(self, tensor: Tensor) -> None:
        self._refs.pop(id(tensor), None)

    def contains_all(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether all tensors are on the host. False if there are none."""
        return bool(tensors) and bool(self._refs) and all(self._contains(tensor) for tensor in tensors)

    def _contains(self, tensor: Tensor) -> bool:
        ref = self._refs.get(id(tensor))
        return ref is not None and ref() is tensor


_DYNAMIC_SHAPES = {
    "nonzero": "nonzero", "nonzero_numpy": "nonzero", "masked_select": "masked_select", "_unique2": "unique",
    "unique_dim": "unique", "unique_consecutive": "unique_consecutive", "repeat_interleave": "repeat_interleave",
    "bincount": "bincount", "index": "a mask as an index", "index_put_": "a mask as an index",
    "_index_put_impl_": "a mask as an index", "index_put": "a mask as an index",
}  # fmt: skip
_INDEX_OPERATORS = ("index", "index_put", "index_put_", "_index_put_impl_")
_MASK_DTYPES = (torch.bool, torch.uint8)


class HostSyncDetector(Detector):
    """Reports reads of values from the device, and operators whose output shape depends on data."""

    def __init__(self, device: str) -> None:
        self._device = device.upper()

    def function(self, call: FunctionCall) -> Iterable[Detection]:
        read, args = HOST_READS.get(call.function), call.args
        if read is not None and args and isinstance(args[0], Tensor) and read.reads(args, call.kwargs):
            yield self._sync(read.description)

    def operator(self, call: OperatorCall) -> Iterable[Detection]:
        if call.phase != "training":
            return
        if call.base == "_local_scalar_dense":
            yield self._sync("reading a number out of a tensor")
        description = _DYNAMIC_SHAPES.get(call.base)
        if not description or (call.base in _INDEX_OPERATORS and not _is_masked(call)):
            return
        if call.name == "repeat_interleave.self_int" or call.kwargs.get("output_size") is not None:
            return
        cost = "it waits for the GPU" + (
            ", and each new shape is compiled and kept in memory" if self._device == "MPS" else ""
        )
        yield Detection(
            "dynamic-shape",
            "warning",
            f"{description}: the shape depends on the data; {cost}",
            "torch.where() or a product with the mask, which keep the shape",
        )

    def _sync(self, description: str) -> Detection:
        return Detection(
            "wait-for-device",
            "warning",
            f"{description} waits until {self._device} has finished all queued work",
            "keep it a tensor, and read it every so many steps, outside the loss",
        )


def _is_masked(call: OperatorCall) -> bool:
    indices = [index for index in call.args[1] if isinstance(index, Tensor)]
    if not any(index.dtype in _MASK_DTYPES for index in indices):
        return False
    # Assigning a single number to masked positions is a masked_fill, whose shapes are static.
    return call.base == "index" or call.args[2].numel() != 1
