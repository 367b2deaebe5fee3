"""Which tensors are the host's, and which calls bring a value from the device to it, so that Python waits?"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ask:
    """A call that asks the device for a value."""

    spoken: str
    only_to_cpu: bool = False
    """Whether it asks only where "cpu" is named: a device that is taken from another tensor is none to wait for."""

    def is_asking(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return not self.only_to_cpu or "cpu" in [a for a in (*args[1:], *kwargs.values()) if isinstance(a, str)]


ASKS: dict[Any, Ask] = {
    Tensor.item: Ask(".item()"),
    Tensor.tolist: Ask(".tolist()"),
    Tensor.__bool__: Ask("the truth of a tensor"),
    Tensor.__float__: Ask("float() of a tensor"),
    Tensor.__int__: Ask("int() of a tensor"),
    Tensor.__index__: Ask("a tensor as an index of Python"),
    Tensor.numpy: Ask(".numpy()"),
    Tensor.__array__: Ask("a NumPy array of a tensor"),
    Tensor.cpu: Ask(".cpu()"),
    Tensor.to: Ask('.to("cpu")', only_to_cpu=True),
    torch.equal: Ask("torch.equal()"),
    torch.allclose: Ask("torch.allclose()"),
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
