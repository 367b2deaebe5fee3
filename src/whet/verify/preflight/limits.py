"""Is any tensor too large for MPS, of too many dimensions, or of a shape that an operator refuses?"""

from collections.abc import Iterable

from torch import Tensor

from whet.base.units import show_bytes
from whet.device.mps_limits import (
    LARGEST_BUFFER,
    MOST_CHANNELS,
    MOST_DIMENSIONS,
    MOST_ELEMENTS,
    MOST_IN_ONE_DIMENSION,
)
from whet.machine.facts import Machine
from whet.verify.preflight.finding import Sighting
from whet.verify.preflight.watcher import Call, Watcher

_POOLS = ("_adaptive_avg_pool2d", "adaptive_avg_pool2d")


def buffer_limit(machine: Machine | None, device: str) -> int | None:
    """The most bytes one tensor may have, where the machine says enough to tell."""
    if machine is None:
        return None
    if device == "cpu":
        return machine.memory_bytes
    found = machine.accelerator(device)
    if found is None or found.usable_bytes is None:
        return None
    return int(found.usable_bytes * LARGEST_BUFFER) if device == "mps" else found.usable_bytes


def too_large(num_bytes: int, limit: int, device: str, *, cure: str) -> Sighting:
    told = f"a tensor of {show_bytes(num_bytes)}, and one may have {show_bytes(limit)}"
    if device == "mps":
        told += " (Metal's maxBufferLength, taken as three quarters of the recommended memory; no Mac was asked)"
    return Sighting("buffer-too-large", "error", told, cure)


class BufferWatcher(Watcher):
    """One tensor must fit into one buffer, on any device."""

    def __init__(self, limit: int, device: str) -> None:
        self._limit = limit
        self._device = device

    def operator(self, call: Call) -> Iterable[Sighting]:
        if call.phase == "making":
            return
        large = [tensor for tensor in call.outputs if tensor.numel() * tensor.element_size() > self._limit]
        # A view of what is there takes no memory, however large it looks.
        fresh = {id(tensor) for tensor in call.new_outputs} if large else set()
        for tensor in large:
            num_bytes = tensor.untyped_storage().nbytes()
            if id(tensor) in fresh and num_bytes > self._limit:
                cure = "a smaller micro-batch, shorter samples, or computing it in pieces"
                yield too_large(num_bytes, self._limit, self._device, cure=cure)


class ShapeWatcher(Watcher):
    """Shapes that MPS's operators refuse or compute wrongly."""

    def operator(self, call: Call) -> Iterable[Sighting]:
        if call.phase == "making":
            return
        deep = any(tensor.dim() > MOST_DIMENSIONS for tensor in call.inputs)
        for tensor in call.outputs:
            if not deep:
                yield from too_deep(tensor, "a tensor")
        for tensor in call.outputs:
            if not any(given.shape == tensor.shape for given in call.inputs):
                yield from too_many(tensor, "a tensor")
        if call.base in _POOLS:
            yield from _uneven_pool(call)
        if call.base == "convolution" and call.outputs[0].dim() > 1 and call.outputs[0].shape[1] > MOST_CHANNELS:
            yield Sighting(
                "too-many-channels",
                "error",
                f"a convolution with {call.outputs[0].shape[1]:,} output channels; MPS has at most {MOST_CHANNELS:,}",
                "fewer channels, or the convolution in pieces",
            )


def too_deep(tensor: Tensor, name: str) -> Iterable[Sighting]:
    if tensor.dim() > MOST_DIMENSIONS:
        yield Sighting(
            "too-many-dimensions",
            "error",
            f"{name} of {tensor.dim()} dimensions; MPS has at most {MOST_DIMENSIONS}",
            "reshape or flatten some of them first",
        )


def too_many(tensor: Tensor, name: str) -> Iterable[Sighting]:
    longest = max(tensor.shape, default=0)
    if longest > MOST_IN_ONE_DIMENSION:
        yield Sighting(
            "too-many-elements",
            "error",
            f"{name} with {longest:,} elements in one dimension; MPS fails or is wrong from 2**31 on",
            "smaller pieces",
        )
    elif tensor.numel() > MOST_ELEMENTS:
        yield Sighting(
            "too-many-elements",
            "warning",
            f"{name} of {tensor.numel():,} elements; MPS has products of at most 2**32",
            "smaller pieces, or a smaller micro-batch",
        )


def _uneven_pool(call: Call) -> Iterable[Sighting]:
    given, wanted = tuple(call.inputs[0].shape[-2:]), tuple(call.outputs[0].shape[-2:])
    if any(max(a, b) % max(min(a, b), 1) for a, b in zip(given, wanted, strict=True)):
        yield Sighting(
            "adaptive-pool",
            "error",
            f"adaptive_avg_pool2d from {given} to {wanted}: on MPS the sizes must divide (pytorch#96056)",
            "sizes that divide, or interpolate() first",
        )
