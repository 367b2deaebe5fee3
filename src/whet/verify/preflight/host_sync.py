"""Detect calls that make Python wait for the device, and shapes that depend on data."""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whet.verify.preflight.findings import Detection, Detector, OperatorCall


@dataclass(frozen=True, slots=True)
class HostRead:
    """A call that asks the device for a value."""

    spoken: str
    only_to_cpu: bool = False
    """Whether it asks only where "cpu" is named: a device that is taken from another tensor is none to wait for."""

    def is_asking(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return not self.only_to_cpu or "cpu" in [a for a in (*args[1:], *kwargs.values()) if isinstance(a, str)]


HOST_READS: dict[Any, HostRead] = {
    Tensor.item: HostRead(".item()"),
    Tensor.tolist: HostRead(".tolist()"),
    Tensor.__bool__: HostRead("the truth of a tensor"),
    Tensor.__float__: HostRead("float() of a tensor"),
    Tensor.__int__: HostRead("int() of a tensor"),
    Tensor.__index__: HostRead("a tensor as an index of Python"),
    Tensor.numpy: HostRead(".numpy()"),
    Tensor.__array__: HostRead("a NumPy array of a tensor"),
    Tensor.cpu: HostRead(".cpu()"),
    Tensor.to: HostRead('.to("cpu")', only_to_cpu=True),
    torch.equal: HostRead("torch.equal()"),
    torch.allclose: HostRead("torch.allclose()"),
}


class HostTensors:
    """Tensors that lie in the host's memory although the trace has one place for all."""

    def __init__(self) -> None:
        self._held: dict[int, weakref.ref[Tensor]] = {}

    def add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._held[id(tensor)] = weakref.ref(tensor)

    def remove(self, tensor: Tensor) -> None:
        self._held.pop(id(tensor), None)

    def holds_all(self, tensors: Sequence[Tensor]) -> bool:
        """Whether there are tensors, and all of them are the host's."""
        return bool(tensors) and bool(self._held) and all(self._holds(tensor) for tensor in tensors)

    def _holds(self, tensor: Tensor) -> bool:
        held = self._held.get(id(tensor))
        return held is not None and held() is tensor


_DYNAMIC = {
    "nonzero": "nonzero", "nonzero_numpy": "nonzero", "masked_select": "masked_select", "_unique2": "unique",
    "unique_dim": "unique", "unique_consecutive": "unique_consecutive", "repeat_interleave": "repeat_interleave",
    "bincount": "bincount", "index": "a mask as an index", "index_put_": "a mask as an index",
    "_index_put_impl_": "a mask as an index", "index_put": "a mask as an index",
}  # fmt: skip
_BY_MASK = ("index", "index_put", "index_put_", "_index_put_impl_")
_MASKS = (torch.bool, torch.uint8)


class HostSyncDetector(Detector):
    """Values that Python asks for, and shapes that only the numbers decide."""

    def __init__(self, device: str) -> None:
        self._device = device.upper()

    def function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Detection]:
        ask = HOST_READS.get(function)
        if ask is not None and args and isinstance(args[0], Tensor) and ask.is_asking(args, kwargs):
            yield self._wait(ask.spoken)

    def operator(self, call: OperatorCall) -> Iterable[Detection]:
        if call.phase != "training":
            return
        if call.base == "_local_scalar_dense":
            yield self._wait("a number out of a tensor")
        spoken = _DYNAMIC.get(call.base)
        if not spoken or (call.base in _BY_MASK and not _is_masked(call)):
            return
        if call.name == "repeat_interleave.self_int" or call.kwargs.get("output_size") is not None:
            return
        cost = "it waits for the GPU" + (
            ", and each new shape is compiled and kept in memory" if self._device == "MPS" else ""
        )
        yield Detection(
            "dynamic-shape",
            "warning",
            f"{spoken}: the shape depends on the numbers; {cost}",
            "torch.where() or a product with the mask, which keep the shape",
        )

    def _wait(self, spoken: str) -> Detection:
        return Detection(
            "wait-for-device",
            "warning",
            f"{spoken} waits until {self._device} has done all it was asked",
            "keep it a tensor; read it every so many steps, outside the loss",
        )


def _is_masked(call: OperatorCall) -> bool:
    indices = [index for index in call.args[1] if isinstance(index, Tensor)]
    if not any(index.dtype in _MASKS for index in indices):
        return False
    # One number for all masked places is a masked_fill, whose shape does not change.
    return call.base == "index" or call.args[2].numel() != 1
