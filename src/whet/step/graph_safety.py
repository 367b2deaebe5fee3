"""Checks that a captured step is still valid: a replay runs no Python."""

import functools
import random
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.optim import Optimizer

from whet.step.rollback import BufferSnapshot

_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SCALARS = (bool, int, float, complex, str, bytes, type(None))


# --- what may not be captured at all ----------------------------------------------------------------------------------


def capture_obstacle(optimizer: Optimizer, scaler: torch.amp.GradScaler, place: torch.device) -> str | None:
    """Why steps with this optimizer cannot be replayed; None where they can."""
    groups, name = optimizer.param_groups, type(optimizer).__name__
    if type(optimizer) is not torch.optim.SGD and not all(group.get("capturable") for group in groups):
        return f"{name} may keep numbers on the host that every step changes; one with capturable=True does not"
    rates = [group["lr"] for group in groups]
    if not all(isinstance(rate, Tensor) and rate.device == place for rate in rates):
        return f"the learning rate of {name} lies on the host; one in a tensor on {place} can change in a graph"
    if scaler.is_enabled() and not getattr(optimizer, "_step_supports_amp_scaling", False):
        return f"loss scaling waits for the device in every step of {name}, unless it is fused"
    return None


def hook_obstacle(model: nn.Module, optimizer: Optimizer) -> str | None:
    """Whose hooks would not be called by a replay; None where there are none."""
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


# --- what a captured step holds for -----------------------------------------------------------------------------------


class CapturedTensors:
    """The modules of a model and its optimizer, listed once: asked in every step."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._modules = list(model.modules())
        self._tensors = [named for module in self._modules for named in (module._parameters, module._buffers)]
        self._optimizer = optimizer

    def modes(self) -> Hashable:
        """What is switched by hand: training or evaluation, what is trained, and the optimizer's plain numbers."""
        groups = self._optimizer.param_groups
        return (
            tuple([module.training for module in self._modules]),
            tuple([t.requires_grad for named in self._tensors for t in named.values() if t is not None]),
            tuple([_as_key(value) for group in groups for name, value in group.items() if name != "params"]),
        )

    def addresses(self) -> list[int]:
        """Where weights, buffers and the optimizer's state lie."""
        found = [t.data_ptr() for named in self._tensors for t in named.values() if t is not None]
        found += [
            value.data_ptr()
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        return found


def loss_key(loss: Callable[..., Any]) -> Hashable:
    """What tells one loss from another: its code, and the plain numbers and objects that it takes from outside.

    A loss may be written anew for each step, and close over a number that changes. What lies deeper is not seen here.
    """
    return tuple([_as_key(value) for value in loss_dependencies(loss)])


def loss_dependencies(loss: Callable[..., Any]) -> Iterator[Any]:
    """The parts of a loss; as long as they are kept, no other object is taken for one of them."""
    if isinstance(loss, functools.partial):
        yield from (*loss.args, *loss.keywords, *loss.keywords.values())
        yield from loss_dependencies(loss.func)
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
    outside = function.__globals__
    yield from (outside[name] for name in code.co_names if name in outside)


def _as_key(value: Any) -> Hashable:
    if isinstance(value, _SCALARS):
        return type(value), value
    if isinstance(value, tuple):
        return tuple(_as_key(part) for part in value)
    return id(value)


# --- what must not have happened while it was captured ----------------------------------------------------------------


class HostSnapshot:
    """Generators of the host and a model's buffers at one moment."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = BufferSnapshot(model)
        self._generators = _host_generators()

    def change(self) -> str | None:
        """What Python did meanwhile that a replay would not do again; None where nothing shows."""
        if _host_generators() != self._generators:
            return "the loss draws from a generator on the host"
        for kept in self._buffers.kept:
            if kept.module._buffers.get(kept.name) is not kept.buffer:
                return f"the forward pass puts another tensor in place of the buffer {kept.name!r}"
        return "the forward pass makes buffers" if self._buffers.have_others_come() else None

    def put_back(self) -> None:
        """Buffers are the same objects with the same values, and generators draw what they would have drawn."""
        self._buffers.put_back()
        torch.set_rng_state(torch.frombuffer(bytearray(self._generators[0]), dtype=torch.uint8))
        random.setstate(self._generators[1])
        name, keys, *rest = self._generators[2]
        np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))


def _host_generators() -> tuple[bytes, Any, tuple[Any, ...]]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), (name, np.asarray(keys).tobytes(), *rest)
