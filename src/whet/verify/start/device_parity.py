"""Compare loss and gradients of a small batch on the device with the CPU, before the first step."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from whet.data.batch import MicroBatch
from whet.device.abstract import HALF_TYPES, AbstractDevice
from whet.device.cpu import CpuDevice
from whet.step.loss import LossFunction, clamp_weight, parse_loss
from whet.verify.isolation import cast_floating, disable_dropout, temporary_copy
from whet.verify.tolerance import error_bound, relative_error, relative_errors

MAX_SAMPLES = 8
_MAX_CPU_FLOPS = 4e10
"""What the CPU is asked to do, roughly: a second or two of a slow one. A large model gets fewer samples."""

PARITY_BOUNDS = {"fp32": (1e-4, 5e-3), "tf32": (5e-3, 2e-2), "bf16": (2e-2, 1e-1), "fp16": (5e-3, 5e-2)}
"""By how much the loss and a gradient may differ, relatively; more where the CPU itself errs in that number format."""
MIN_LOSS_SCALE = 1e-2
"""A loss below is measured against this: what is left of it then is the rounding of larger numbers. Gradients tell."""
FP16_LOSS_SCALE = 1024.0
"""fp16 gradients underflow without one."""


class LossAndGradients(NamedTuple):
    """One forward and backward pass."""

    loss: Tensor
    gradients: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceParity:
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


def parity_batch_size(num_parameters: int, length: int) -> int:
    """How many samples are tried: up to 8, fewer of a large model, and never one alone (BatchNorm)."""
    affordable = int(_MAX_CPU_FLOPS / (6 * max(1, num_parameters) * max(1, length)))
    return max(2, min(MAX_SAMPLES, affordable))


def compute_precision(model: nn.Module, precision: str) -> str:
    """In what a model computes, as far as rounding goes: weights in half precision round by themselves."""
    types = {parameter.dtype for parameter in model.parameters()}
    return next((name for name, half in HALF_TYPES.items() if half in types), precision)


def loss_and_gradients(
    model: nn.Module, device: AbstractDevice, loss: LossFunction, micro: MicroBatch, *, precision: str
) -> LossAndGradients:
    """The loss and every gradient of a micro-batch, without dropout, on the CPU. Only inside `untouched`."""
    scale = FP16_LOSS_SCALE if precision == "fp16" else 1.0
    try:
        with disable_dropout(model, is_quiet=True):
            mean = forward_backward(device, loss, micro, precision=precision, scale=scale)
        return LossAndGradients(
            mean.cpu(), {name: gradient.cpu() / scale for name, gradient in dense_gradients(model).items()}
        )
    finally:
        clear_gradients(model)


def forward_backward(
    device: AbstractDevice, loss: LossFunction, micro: MicroBatch, *, precision: str, scale: float
) -> Tensor:
    """The loss of a micro-batch; its gradients, times `scale`, are added to those that are there."""
    with device.computing(), torch.enable_grad():
        with device.autocast(precision):
            total, weight = parse_loss(loss(micro.moved(device.put)))
        mean = total if weight is None else total / clamp_weight(weight)
        (mean * scale).backward()
    return mean.detach()


def dense_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Where they are; sparse ones as dense ones."""
    return {name: _dense(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def clear_gradients(model: nn.Module) -> None:
    """They are somebody else's now, or nobody's."""
    for parameter in model.parameters():
        parameter.grad = None


def compare_with_cpu(
    model: nn.Module, loss: LossFunction, micro: MicroBatch, found: LossAndGradients, *, precision: str
) -> DeviceParity:
    """What was found on a device beside the CPU in float32. Only inside `untouched`.

    Where a bound is passed, the CPU is asked again, more exactly in float32 and in half precision otherwise: how much
    it errs itself is what this batch does not tell.
    """
    expected = _on_cpu(model, loss, micro)
    agreement = _device_parity(found, expected, *PARITY_BOUNDS[precision])
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
    own = _device_parity(coarse, exact, math.inf, math.inf)
    bounds = PARITY_BOUNDS[precision]
    return _device_parity(
        found, expected, error_bound(bounds[0], own.loss_error), error_bound(bounds[1], own.gradient_error)
    )


def _on_cpu(
    model: nn.Module,
    loss: LossFunction,
    micro: MicroBatch,
    *,
    precision: str = "fp32",
    dtype: torch.dtype | None = None,
) -> LossAndGradients:
    cpu = CpuDevice()
    with temporary_copy(model, cpu.place, dtype):
        there = micro.moved(lambda tensor: cast_floating(tensor.cpu(), dtype))
        return loss_and_gradients(model, cpu, loss, there, precision=precision)


def _device_parity(
    found: LossAndGradients, expected: LossAndGradients, loss_bound: float, gradient_bound: float
) -> DeviceParity:
    errors = relative_errors(found.gradients, expected.gradients)
    worst = max(errors, key=lambda name: errors[name]) if errors else ""
    return DeviceParity(
        here=float(found.loss),
        on_cpu=float(expected.loss),
        loss_error=relative_error(found.loss, expected.loss, floor=MIN_LOSS_SCALE),
        loss_bound=loss_bound,
        gradient_error=errors.get(worst, 0.0),
        gradient_bound=gradient_bound,
        worst=worst,
        num_gradients=len(expected.gradients),
    )


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def repeat_difference(one: LossAndGradients, other: LossAndGradients) -> str | None:
    """In words how two passes over the same micro-batch differ; None where every bit is the same."""
    same = {**one.gradients, "the loss": one.loss}
    again = {**other.gradients, "the loss": other.loss}
    different = [n for n in same if n not in again or not torch.equal(_bits(same[n]), _bits(again[n]))]
    if not different:
        return None
    errors = relative_errors(again, same)
    return f"other bits the second time in {len(different)} of {len(same)} tensors, by {max(errors.values()):.0e}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A NaN is equal to itself here."""
    return tensor.contiguous().view(-1).view(torch.uint8)
