"""How is a model tried out so that nobody can tell afterwards? Same objects, same memory, same bits, same draws."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from whet.checkpoint.randomness import undisturbed
from whet.device.abstract import AbstractDevice
from whet.step.buffers import Buffers

_ALMOST_ZERO = 1e-3
_NOISE = 0.02


@contextmanager
def untouched(model: nn.Module, device: AbstractDevice) -> Iterator[None]:
    """The model and every generator are as before afterwards; inside, what is compiled runs as it is written.

    What a loss keeps in Python objects of its own is not put back.
    """
    with as_before(model), undisturbed(device), uncompiled():
        yield


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Weights, gradients, buffers and modes are as before afterwards, whatever happens inside, and wherever.

    Inside no parameter has a gradient.
    """
    kept = [(p, p.device, p.detach().to("cpu", copy=True), p.grad) for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    buffers = Buffers(model)
    try:
        for parameter, *_ in kept:
            parameter.grad = None
        yield
    finally:
        for parameter, place, values, gradient in kept:
            memory = parameter.data.to(place, values.dtype)
            if not torch.equal(memory.cpu(), values):
                memory.copy_(values)
            parameter.grad = None
            parameter.data = memory
            parameter.grad = gradient
        buffers.put_back()
        for module, mode in modes:
            module.training = mode


@contextmanager
def in_memory_of(model: nn.Module, place: torch.device, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Every parameter and buffer is a copy elsewhere for a while; the objects stay the same, and so does their memory.

    With `dtype`, floating-point ones are of that type too.
    """
    kept = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    try:
        for tensor, memory in kept:
            tensor.data = as_type(memory.to(place, copy=True), dtype)
        yield
    finally:
        for tensor, memory in kept:
            tensor.data = memory


def as_type(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A floating-point tensor in another type; whole numbers as they are."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


@torch.no_grad()
def wake_zeros(model: nn.Module) -> None:
    """Noise in the place of weights that are zero, or almost: they would hide what lies behind them.

    Only inside `untouched`, which puts the weights back.
    """
    noise = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.numel() and float(parameter.abs().max()) < _ALMOST_ZERO:
            drawn = torch.randn(parameter.shape, generator=noise) * _NOISE
            parameter.copy_(drawn.to(parameter))


def uncompiled() -> AbstractContextManager[object]:
    """A model that is compiled runs as it is written: compiling it once more, for the CPU too, would take minutes."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
