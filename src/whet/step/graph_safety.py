"""Check whether a step can be captured, and whether a captured step is still valid.

A replay runs no Python code, so everything that Python decided during the capture must still hold.
"""

import functools
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.optim import Optimizer

from whet.device.rng import get_host_rng, host_rng_equal, set_host_rng
from whet.step.loss import BatchLoss
from whet.step.rollback import BufferSnapshot

_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SCALARS = (bool, int, float, complex, str, bytes, type(None))


# --- before a capture -------------------------------------------------------------------------------------------------


def capture_obstacle(optimizer: Optimizer, scaler: torch.amp.GradScaler, device: torch.device) -> str | None:
    """Return the reason why steps with this optimizer cannot be replayed; None if they can."""
    groups, name = optimizer.param_groups, type(optimizer).__name__
    if type(optimizer) is not torch.optim.SGD and not all(group.get("capturable") for group in groups):
        return f"{name} may keep per-step values on the host; with capturable=True it does not"
    if type(optimizer) is torch.optim.SGD and not all(g.get("fused") or isinstance(g["lr"], Tensor) for g in groups):
        return "the learning rate of SGD is on the host, unless it is fused"
    if any(isinstance(group["lr"], Tensor) and group["lr"].device != device for group in groups):
        return f"the learning rate of {name} is a tensor on the host; use a number, or a tensor on {device}"
    # The scaler checks on the host whether gradients are finite. Only fused optimizers make that decision on the
    # device.
    if scaler.is_enabled() and not getattr(optimizer, "_step_supports_amp_scaling", False):
        return f"loss scaling waits for the device in every step of {name}, unless it is fused"
    return None


def hook_obstacle(model: nn.Module, optimizer: Optimizer) -> str | None:
    """Return a description of hooks that a replay would not call; None if there are none."""
    shared = [*_MODULE_HOOKS, "_full_backward_hooks"]
    if any(getattr(nn_module, f"_global{name}", None) for name in shared):
        return "hooks on all modules would not be called"
    for name, module in model.named_modules():
        if any(getattr(module, hooks, None) for hooks in _MODULE_HOOKS):
            return f"hooks on {name or type(model).__name__} would not be called"
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"hooks on {name} would not be called"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"hooks on {type(optimizer).__name__} would not be called"
    return None


# --- validity of a captured step --------------------------------------------------------------------------------------


class CapturedTensors:
    """The modes and tensor addresses of a model and an optimizer.

    The modules are listed once, because the modes are read in every step.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._modules = list(model.modules())
        self._tensors = [named for module in self._modules for named in (module._parameters, module._buffers)]
        self._optimizer = optimizer

    def modes(self) -> Hashable:
        """Return the training flags of all modules and the requires_grad flags of all tensors."""
        return (
            tuple([module.training for module in self._modules]),
            tuple([t.requires_grad for named in self._tensors for t in named.values() if t is not None]),
        )

    def addresses(self) -> list[int]:
        """Return the addresses of weights, buffers and optimizer state."""
        addresses = [t.data_ptr() for named in self._tensors for t in named.values() if t is not None]
        addresses += [
            value.data_ptr()
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        return addresses


class CapturedGroups:
    """The hyperparameters of an optimizer during captured steps.

    If a learning rate is a number, it remains one for the user and for eager steps. A captured step reads it from a
    tensor on the device, which is filled before each replay. All other hyperparameters are constants of the capture.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device, *, dtype: torch.dtype) -> None:
        self._optimizer = optimizer
        self._rates = [torch.zeros((), dtype=dtype, device=device) for _ in optimizer.param_groups]

    def constants(self) -> Hashable:
        """Return all hyperparameters except learning rates that are plain numbers."""
        return tuple(
            [
                _as_key(value)
                for group in self._optimizer.param_groups
                for name, value in group.items()
                if name != "params" and (name != "lr" or isinstance(value, Tensor))
            ]
        )

    def fill_rates(self) -> None:
        """Copy the current learning rates to the tensors that captured steps read."""
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            if not isinstance(group["lr"], Tensor):
                rate.fill_(group["lr"])

    @contextmanager
    def rates_on_device(self) -> Iterator[None]:
        """Make the optimizer read its learning rates from tensors on the device, for the duration of a capture."""
        numbers = [group["lr"] for group in self._optimizer.param_groups]
        self.fill_rates()
        try:
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                if not isinstance(group["lr"], Tensor):
                    group["lr"] = rate
            yield
        finally:
            for group, number in zip(self._optimizer.param_groups, numbers, strict=True):
                group["lr"] = number


def loss_key(loss: Callable[..., Any]) -> Hashable:
    """Return a key for a loss, made from its code and the scalars and objects it refers to.

    A user's loop may create a new closure over a changing value in each step. Nested objects are not inspected.
    """
    return tuple([_as_key(value) for value in loss_dependencies(loss)])


def loss_dependencies(loss: Callable[..., Any]) -> Iterator[Any]:
    """Yield everything a loss refers to. The caller keeps these objects alive, so that their ids are not reused.

    A weakref.proxy is replaced by the object it refers to. If that object no longer exists, the proxy is left out,
    because isinstance would raise.
    """
    for part in _dependencies(loss):
        if type(part) not in weakref.ProxyTypes:
            yield part
            continue
        with suppress(ReferenceError, AttributeError):
            yield part.__init__.__self__


def _dependencies(loss: Callable[..., Any]) -> Iterator[Any]:
    if isinstance(loss, BatchLoss):
        yield loss.model
        yield from _dependencies(loss.function)
        return
    if isinstance(loss, functools.partial):
        yield from (*loss.args, *loss.keywords, *loss.keywords.values())
        yield from _dependencies(loss.func)
        return
    function = getattr(loss, "__func__", loss)
    code = getattr(function, "__code__", None)
    if code is None:
        yield loss
        return
    yield from (code, getattr(loss, "__self__", None), *(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            yield cell.cell_contents
    namespace = function.__globals__
    yield from (namespace[name] for name in code.co_names if name in namespace)


def _as_key(value: Any) -> Hashable:
    if isinstance(value, _SCALARS):
        return type(value), value
    if isinstance(value, tuple):
        return tuple(_as_key(part) for part in value)
    return id(value)


# --- side effects of a capture ----------------------------------------------------------------------------------------


class HostSnapshot:
    """A copy of the host's random generator states and of a model's buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = BufferSnapshot(model)
        self._torch_rng = torch.get_rng_state()
        self._host_rng = get_host_rng()

    def change(self) -> str | None:
        """Return a description of changes by Python code that a replay would not repeat; None if there are none."""
        if not (torch.equal(torch.get_rng_state(), self._torch_rng) and host_rng_equal(get_host_rng(), self._host_rng)):
            return "the loss draws from a generator on the host"
        for saved in self._buffers.saved:
            if saved.module._buffers.get(saved.name) is not saved.buffer:
                return f"the forward pass replaces the buffer {saved.name!r}"
        return "the forward pass creates buffers" if self._buffers.has_new_names() else None

    def restore(self) -> None:
        """Restore the buffers and generators to their state before the capture."""
        self._buffers.restore()
        torch.set_rng_state(self._torch_rng)
        set_host_rng(self._host_rng)
