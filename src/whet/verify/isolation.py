"""Context managers that restore weights, buffers, modes and random generators after running a model."""

import math
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from whet.device.abstract import AbstractDevice
from whet.device.rng import preserve_rng
from whet.step.optimizers import OptimizerChoice
from whet.step.rollback import BufferSnapshot

# A weight counts as zero if all absolute values in it are smaller than this.
_ZERO_THRESHOLD = 1e-3
# Standard deviation of the noise that replaces zero weights.
_NOISE = 0.02
_DROPOUT_FUNCTIONS = {
    f.dropout, f.dropout1d, f.dropout2d, f.dropout3d, f.alpha_dropout, f.feature_alpha_dropout
}  # fmt: skip
# These modules draw no random numbers, but compute differently in eval mode. cuDNN also has no backward pass for a
# recurrent layer in eval mode.
_KEEP_TRAINING_MODE = (nn.RNNBase, nn.modules.batchnorm._BatchNorm)


@contextmanager
def preserve_model_and_rng(model: nn.Module, device: AbstractDevice) -> Iterator[None]:
    """Restore the model and every random generator on exit, and run compiled code eagerly inside.

    State that a loss function keeps in Python objects is not restored.
    """
    with preserve_model(model), preserve_rng(device), force_eager():
        yield


@contextmanager
def preserve_model(model: nn.Module) -> Iterator[None]:
    """Restore weights, gradients, buffers and modes on exit, with the same objects, memory and bits.

    Gradients are None inside the context.
    """
    saved = [(p, p.device, p.detach().to("cpu", copy=True), p.grad) for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    buffers = BufferSnapshot(model)
    try:
        for parameter, *_ in saved:
            parameter.grad = None
        yield
    finally:
        for parameter, place, values, gradient in saved:
            memory = parameter.data.to(place, values.dtype)
            if not torch.equal(memory.cpu(), values):
                memory.copy_(values)
            # A gradient must match the dtype and device of its parameter, so remove it while the data is replaced.
            parameter.grad = None
            parameter.data = memory
            parameter.grad = gradient
        buffers.restore()
        for module, mode in modes:
            module.training = mode


@contextmanager
def temporary_copy(model: nn.Module, place: torch.device, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Replace the memory of every parameter and buffer with a copy on `place`, and restore it on exit.

    With `dtype`, the copies of floating-point tensors are converted.
    """
    saved = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    try:
        for tensor, memory in saved:
            tensor.data = cast_floating(memory.to(place, copy=True), dtype)
        yield
    finally:
        for tensor, memory in saved:
            tensor.data = memory


def cast_floating(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Convert a floating-point tensor to `dtype`; return any other tensor unchanged."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


@torch.no_grad()
def perturb_zero_weights(model: nn.Module) -> None:
    """Fill almost-zero weights with noise, because a zero weight hides every error in the layers before it.

    Call this inside `preserve_model_and_rng`, which restores the weights.
    """
    # A separate generator leaves the global one unchanged.
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.numel() and float(parameter.abs().max()) < _ZERO_THRESHOLD:
            noise = torch.randn(parameter.shape, generator=generator) * _NOISE
            parameter.copy_(noise.to(parameter))


def force_eager() -> AbstractContextManager[object]:
    """Return a context in which compiled models run eagerly.

    Recompiling for another shape or for the CPU would take minutes.
    """
    # Importing torch._dynamo takes seconds. If nothing has imported it, nothing is compiled.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


@contextmanager
def disable_dropout(model: nn.Module, *, use_eval_mode: bool = False, only_fused: bool = False) -> Iterator[None]:
    """Disable dropout in modules, functions and attention, because random generators differ between devices.

    With `use_eval_mode`, other modules are also set to eval mode, which disables other random draws, such as stochastic
    depth. Batch norm and recurrent layers stay in training mode: they draw nothing, but compute differently in eval
    mode. With `only_fused`, only dropout inside attention and recurrent kernels is disabled, because all other draws
    can be recorded and replayed.
    """
    saved: list[tuple[nn.Module, str, Any]] = []

    def override(module: nn.Module, name: str, value: Any) -> None:
        saved.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            override(module, "dropout", 0.0)
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd) and not only_fused
        if is_dropout or (use_eval_mode and not isinstance(module, _KEEP_TRAINING_MODE)):
            override(module, "training", False)
    try:
        with _DropoutFreeFunctions(set() if only_fused else _DROPOUT_FUNCTIONS):
            yield
    finally:
        for module, name, value in saved:
            setattr(module, name, value)


class _DropoutFreeFunctions(TorchFunctionMode):
    def __init__(self, skipped: Collection[Any]) -> None:
        super().__init__()
        self._skipped = skipped

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._skipped:
            return args[0] if args else kwargs["input"]
        if func is f.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif not math.isclose(kwargs.get("dropout_p", 0.0), 0.0):
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


# --- model and optimizer ----------------------------------------------------------------------------------------------


@contextmanager
def preserve_state(model: nn.Module, optimizer: Optimizer | OptimizerChoice) -> Iterator[None]:
    """Restore the model and the optimizer on exit."""
    restore = _snapshot(vars(optimizer), _parameter_ids(optimizer)) if isinstance(optimizer, Optimizer) else None
    with preserve_model(model):
        try:
            yield
        finally:
            if restore is not None:
                restore()


def _parameter_ids(optimizer: Optimizer) -> set[int]:
    """Return the ids of all parameters. `preserve_model` restores them, so the optimizer snapshot skips them."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _snapshot(value: Any, skip: set[int]) -> Callable[[], Any]:
    """Return a function that restores this value in place, because a user's scheduler may refer to the same object."""
    if id(value) in skip or not isinstance(value, Tensor | dict | list | tuple):
        return lambda: value
    if isinstance(value, Tensor):
        saved = value.detach().clone()
        return lambda: _refill(value, saved)
    if isinstance(value, dict):
        parts = {name: _snapshot(part, skip) for name, part in value.items()}

        def restore_dict() -> Any:
            restored = {name: part() for name, part in parts.items()}
            value.clear()
            value.update(restored)
            return value

        return restore_dict
    items = [_snapshot(item, skip) for item in value]

    def restore_items() -> Any:
        restored = [item() for item in items]
        if isinstance(value, list):
            value[:] = restored
        return value

    return restore_items


@torch.no_grad()
def _refill(tensor: Tensor, saved: Tensor) -> Tensor:
    if tensor.device == saved.device and tensor.shape == saved.shape and tensor.dtype == saved.dtype:
        tensor.copy_(saved)
    else:
        tensor.data = saved
    return tensor
