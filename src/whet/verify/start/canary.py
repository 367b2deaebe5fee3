"""Does a model compute on a device what it computes on the CPU? A tiny batch tells: its loss and every gradient."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from whet.data.batch import Micro
from whet.device.abstract import HALF_TYPES, AbstractDevice
from whet.device.cpu import Cpu
from whet.step.loss import LossFunction, at_least_tiny, split_loss
from whet.verify.agreement import bound_of, error_of, errors_by_name
from whet.verify.untouched import as_type, in_memory_of
from whet.verify.without_dropout import without_dropout

MOST_SAMPLES = 8
_MOST_OPERATIONS = 4e10
"""What the CPU is asked to do, roughly: a second or two of a slow one. A large model gets fewer samples."""

BOUNDS = {"fp32": (1e-4, 5e-3), "tf32": (5e-3, 2e-2), "bf16": (2e-2, 1e-1), "fp16": (5e-3, 5e-2)}
"""By how much the loss and a gradient may differ, relatively; more where the CPU itself errs in that number format."""
LEAST_LOSS = 1e-2
"""A loss below is measured against this: what is left of it then is the rounding of larger numbers. Gradients tell."""
SCALE = 1024.0
"""fp16 gradients underflow without one."""


class Found(NamedTuple):
    """One forward and backward pass."""

    loss: Tensor
    gradients: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """A device beside the CPU; errors are relative."""

    here: float
    on_cpu: float
    loss_error: float
    loss_bound: float
    gradient_error: float
    gradient_bound: float
    worst: str
    """The gradient with the largest error."""
    num_gradients: int

    @property
    def holds(self) -> bool:
        # `<=`: a NaN is over every bound.
        return self.loss_error <= self.loss_bound and self.gradient_error <= self.gradient_bound

    def __str__(self) -> str:
        if self.holds:
            worst = max(self.loss_error, self.gradient_error)
            return f"loss and {self.num_gradients} gradients agree with the CPU ({worst:.0e})"
        if not self.gradient_error <= self.gradient_bound:
            return (
                f"the gradient of {self.worst} differs from the CPU's by {self.gradient_error:.1e} "
                f"(at most {self.gradient_bound:.0e}); loss {self.here:.7g} and {self.on_cpu:.7g}"
            )
        return (
            f"the loss is {self.here:.7g}, and {self.on_cpu:.7g} on the CPU: "
            f"differs by {self.loss_error:.1e} (at most {self.loss_bound:.0e})"
        )


def num_samples(num_parameters: int, length: int) -> int:
    """How many samples are tried: up to 8, fewer of a large model, and never one alone (BatchNorm)."""
    affordable = int(_MOST_OPERATIONS / (6 * max(1, num_parameters) * max(1, length)))
    return max(2, min(MOST_SAMPLES, affordable))


def number_format(model: nn.Module, precision: str) -> str:
    """In what a model computes, as far as rounding goes: weights in half precision round by themselves."""
    types = {parameter.dtype for parameter in model.parameters()}
    return next((name for name, half in HALF_TYPES.items() if half in types), precision)


def compute(model: nn.Module, device: AbstractDevice, loss: LossFunction, micro: Micro, *, precision: str) -> Found:
    """The loss and every gradient of a micro-batch, without dropout, on the CPU. Only inside `untouched`."""
    scale = SCALE if precision == "fp16" else 1.0
    try:
        with without_dropout(model, is_quiet=True):
            mean = go_through(device, loss, micro, precision=precision, scale=scale)
        return Found(mean.cpu(), {name: gradient.cpu() / scale for name, gradient in gradients_of(model).items()})
    finally:
        drop_gradients(model)


def go_through(device: AbstractDevice, loss: LossFunction, micro: Micro, *, precision: str, scale: float) -> Tensor:
    """The loss of a micro-batch; its gradients, times `scale`, are added to those that are there."""
    with device.computing(), torch.enable_grad():
        with device.autocast(precision):
            total, weight = split_loss(loss(micro.moved(device.put)))
        mean = total if weight is None else total / at_least_tiny(weight)
        (mean * scale).backward()
    return mean.detach()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Where they are; sparse ones as dense ones."""
    return {name: _dense(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def drop_gradients(model: nn.Module) -> None:
    """They are somebody else's now, or nobody's."""
    for parameter in model.parameters():
        parameter.grad = None


def compare(model: nn.Module, loss: LossFunction, micro: Micro, found: Found, *, precision: str) -> Agreement:
    """What was found on a device beside the CPU in float32. Only inside `untouched`.

    Where a bound is passed, the CPU is asked again, more exactly in float32 and in half precision otherwise: how much
    it errs itself is what this batch does not tell.
    """
    expected = _on_cpu(model, loss, micro)
    agreement = _agreement(found, expected, *BOUNDS[precision])
    if agreement.holds:
        return agreement
    try:
        if precision == "fp32":
            coarse, exact = expected, _on_cpu(model, loss, micro, dtype=torch.float64)
        else:
            half = "fp16" if precision == "fp16" else "bf16"
            coarse, exact = _on_cpu(model, loss, micro, precision=half), expected
    except Exception:
        # Not every loss can be computed in another type.
        return agreement
    own = _agreement(coarse, exact, math.inf, math.inf)
    bounds = BOUNDS[precision]
    return _agreement(found, expected, bound_of(bounds[0], own.loss_error), bound_of(bounds[1], own.gradient_error))


def _on_cpu(
    model: nn.Module, loss: LossFunction, micro: Micro, *, precision: str = "fp32", dtype: torch.dtype | None = None
) -> Found:
    cpu = Cpu()
    with in_memory_of(model, cpu.place, dtype):
        there = micro.moved(lambda tensor: as_type(tensor.cpu(), dtype))
        return compute(model, cpu, loss, there, precision=precision)


def _agreement(found: Found, expected: Found, loss_bound: float, gradient_bound: float) -> Agreement:
    errors = errors_by_name(found.gradients, expected.gradients)
    worst = max(errors, key=lambda name: errors[name]) if errors else ""
    return Agreement(
        here=float(found.loss),
        on_cpu=float(expected.loss),
        loss_error=error_of(found.loss, expected.loss, floor=LEAST_LOSS),
        loss_bound=loss_bound,
        gradient_error=errors.get(worst, 0.0),
        gradient_bound=gradient_bound,
        worst=worst,
        num_gradients=len(expected.gradients),
    )


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
