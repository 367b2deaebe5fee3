"""Context managers that try out a model and restore its weights, buffers, modes and generators."""

import math
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f
from torch.overrides import TorchFunctionMode

from whet.device.abstract import AbstractDevice
from whet.device.rng import preserve_rng
from whet.step.rollback import BufferSnapshot

_ZERO_THRESHOLD = 1e-3
_NOISE = 0.02


@contextmanager
def preserve_model_and_rng(model: nn.Module, device: AbstractDevice) -> Iterator[None]:
    """The model and every generator are as before afterwards; inside, what is compiled runs as it is written.

    What a loss keeps in Python objects of its own is not put back.
    """
    with preserve_model(model), preserve_rng(device), force_eager():
        yield


@contextmanager
def preserve_model(model: nn.Module) -> Iterator[None]:
    """Weights, gradients, buffers and modes are as before afterwards, whatever happens inside, and wherever.

    Inside no parameter has a gradient.
    """
    kept = [(p, p.device, p.detach().to("cpu", copy=True), p.grad) for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    buffers = BufferSnapshot(model)
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
def temporary_copy(model: nn.Module, place: torch.device, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Every parameter and buffer is a copy elsewhere for a while; the objects stay the same, and so does their memory.

    With `dtype`, floating-point ones are of that type too.
    """
    kept = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    try:
        for tensor, memory in kept:
            tensor.data = cast_floating(memory.to(place, copy=True), dtype)
        yield
    finally:
        for tensor, memory in kept:
            tensor.data = memory


def cast_floating(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A floating-point tensor in another type; whole numbers as they are."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


@torch.no_grad()
def perturb_zero_weights(model: nn.Module) -> None:
    """Noise in the place of weights that are zero, or almost: they would hide what lies behind them.

    Only inside `preserve_model_and_rng`, which puts the weights back.
    """
    noise = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.numel() and float(parameter.abs().max()) < _ZERO_THRESHOLD:
            drawn = torch.randn(parameter.shape, generator=noise) * _NOISE
            parameter.copy_(drawn.to(parameter))


def force_eager() -> AbstractContextManager[object]:
    """A model that is compiled runs as it is written: compiling it once more, for the CPU too, would take minutes."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


_DROPOUT_FUNCTIONS = {
    f.dropout, f.dropout1d, f.dropout2d, f.dropout3d, f.alpha_dropout, f.feature_alpha_dropout
}  # fmt: skip
# cuDNN has no backward pass for a recurrent layer in eval mode.
_KEEP_TRAINING_MODE = (nn.RNNBase, nn.modules.batchnorm._BatchNorm)


@contextmanager
def disable_dropout(model: nn.Module, *, is_quiet: bool = False) -> Iterator[None]:
    """Dropout does nothing inside, as a module, as a function or within attention; all else stays in its mode.

    If it is to be quiet, modules are in eval mode too, so that those that draw by themselves do not, such as stochastic
    depth; but for layers that compute otherwise in training and draw nothing.
    """
    kept: list[tuple[nn.Module, str, Any]] = []

    def switch(module: nn.Module, name: str, value: Any) -> None:
        kept.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            switch(module, "dropout", 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd) or (
            is_quiet and not isinstance(module, _KEEP_TRAINING_MODE)
        ):
            switch(module, "training", False)
    try:
        with _DropoutFreeFunctions():
            yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


class _DropoutFreeFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUT_FUNCTIONS:
            return args[0] if args else kwargs["input"]
        if func is f.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif not math.isclose(kwargs.get("dropout_p", 0.0), 0.0):
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)
