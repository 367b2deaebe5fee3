"""Compare the loss and gradients of a small batch on the device with the CPU, before the first step."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from whet.data.batch import MicroBatch
from whet.device.abstract import HALF_TYPES, AbstractDevice
from whet.device.cpu import CpuDevice
from whet.step.loss import MicroLoss, clamp_weight, parse_loss
from whet.verify.draws import RecordedDraws
from whet.verify.isolation import cast_floating, disable_dropout, temporary_copy
from whet.verify.tolerance import error_bound, relative_error, relative_errors
from whet.verify.value_bytes import same_bits

MAX_SAMPLES = 8
# Maximum number of FLOPs on the CPU, which take a second or two if it is slow. Large models use fewer samples.
_MAX_CPU_FLOPS = 4e10
# Maximum relative errors of the loss and of the gradients. The bounds grow if the CPU itself is inaccurate.
PARITY_BOUNDS = {"fp32": (1e-4, 5e-3), "tf32": (5e-3, 2e-2), "bf16": (2e-2, 1e-1), "fp16": (5e-3, 5e-2)}
# Bounds may grow up to this value or by this factor, whichever is larger. Wider bounds would hide a wrong result.
_MAX_BOUND, _MAX_GROWTH = 1e-2, 5
# Minimum denominator of the relative error of a loss, because a smaller loss is mostly the rounding of larger numbers.
MIN_LOSS_SCALE = 1e-2
# Without a loss scale, fp16 gradients underflow.
FP16_LOSS_SCALE = 1024.0


class LossAndGradients(NamedTuple):
    """The loss and the gradients of one forward and backward pass."""

    loss: Tensor
    gradients: dict[str, Tensor]
    """Gradients by the name of the parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceParity:
    """Relative errors of the loss and gradients of a device, compared with the CPU."""

    device_loss: float
    cpu_loss: float
    loss_error: float
    loss_bound: float
    gradient_error: float
    gradient_bound: float
    worst: str
    """Name of the gradient with the largest error."""
    num_gradients: int

    @property
    def agrees(self) -> bool:
        # Use `<=`, so that NaN exceeds every bound.
        return self.loss_error <= self.loss_bound and self.gradient_error <= self.gradient_bound

    def __str__(self) -> str:
        if self.agrees:
            worst = max(self.loss_error, self.gradient_error)
            return f"loss and {self.num_gradients} gradients agree with the CPU ({worst:.0e})"
        if not self.gradient_error <= self.gradient_bound:
            return (
                f"the gradient of {self.worst} differs from the CPU's by {self.gradient_error:.1e} "
                f"(at most {self.gradient_bound:.0e}); loss {self.device_loss:.7g} and {self.cpu_loss:.7g}"
            )
        return (
            f"the loss is {self.device_loss:.7g}, and {self.cpu_loss:.7g} on the CPU: "
            f"differs by {self.loss_error:.1e} (at most {self.loss_bound:.0e})"
        )


def parity_batch_size(num_parameters: int, length: int) -> int:
    """Return the number of samples for the comparison: MAX_SAMPLES, or fewer for a large model, but at least 2.

    BatchNorm needs at least 2. `length` is the number of positions of a sample.
    """
    affordable = int(_MAX_CPU_FLOPS / (6 * max(1, num_parameters) * max(1, length)))
    return max(2, min(MAX_SAMPLES, affordable))


def compute_precision(model: nn.Module, precision: str) -> str:
    """Return the precision that determines rounding errors: that of half-precision weights, or else `precision`."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    return next((name for name, half in HALF_TYPES.items() if half in dtypes), precision)


def loss_and_gradients(
    model: nn.Module,
    device: AbstractDevice,
    loss: MicroLoss,
    micro: MicroBatch,
    *,
    precision: str,
    draws: RecordedDraws,
) -> LossAndGradients:
    """Return the loss and gradients of a micro-batch without dropout, moved to the CPU. The model is not restored.

    The first pass records its random draws in `draws`, and later passes repeat them.
    """
    scale = FP16_LOSS_SCALE if precision == "fp16" else 1.0
    try:
        with disable_dropout(model, use_eval_mode=True), draws.record_or_repeat():
            mean = forward_backward(device, loss, micro, precision=precision, scale=scale)
        gradients = {name: gradient.cpu() / scale for name, gradient in dense_gradients(model).items()}
        return LossAndGradients(mean.cpu(), gradients)
    finally:
        clear_gradients(model)


def forward_backward(
    device: AbstractDevice, loss: MicroLoss, micro: MicroBatch, *, precision: str, scale: float
) -> Tensor:
    """Compute the loss of a micro-batch, and accumulate its gradients multiplied by `scale`. Return the loss."""
    with device.compute_context(), torch.enable_grad():
        with device.autocast(precision):
            total, weight = parse_loss(loss(micro.map_tensors(device.put)))
        mean = total if weight is None else total / clamp_weight(weight)
        (mean * scale).backward()
    return mean.detach()


def dense_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients by name. Sparse gradients are converted to dense ones."""
    named = ((name, parameter.grad) for name, parameter in model.named_parameters())
    return {name: grad.to_dense() if grad.is_sparse else grad for name, grad in named if grad is not None}


def clear_gradients(model: nn.Module) -> None:
    """Set all gradients to None."""
    for parameter in model.parameters():
        parameter.grad = None


def compare_with_cpu(
    model: nn.Module,
    loss: MicroLoss,
    micro: MicroBatch,
    actual: LossAndGradients,
    *,
    precision: str,
    draws: RecordedDraws,
) -> DeviceParity:
    """Compare the result of a device with the CPU in float32. The model is not restored.

    If an error exceeds its bound, measure the rounding error of the CPU: float32 compared with float64, or half
    precision compared with float32. The bounds grow with that error. Raise ArithmeticError if they would become too
    wide to be useful.
    """
    expected = _on_cpu(model, loss, micro, draws)
    bounds = PARITY_BOUNDS[precision]
    parity = _device_parity(actual, expected, *bounds)
    if parity.agrees:
        return parity
    try:
        if precision == "fp32":
            coarse, exact = expected, _on_cpu(model, loss, micro, draws, dtype=torch.float64)
        else:
            half = "fp16" if precision == "fp16" else "bf16"
            coarse, exact = _on_cpu(model, loss, micro, draws, precision=half), expected
    except Exception:
        # Not every loss can be computed in another dtype.
        return parity
    cpu = _device_parity(coarse, exact, math.inf, math.inf)
    grown = [error_bound(*pair) for pair in zip(bounds, (cpu.loss_error, cpu.gradient_error), strict=True)]
    useful = [max(_MAX_BOUND, _MAX_GROWTH * bound) for bound in bounds]
    parity = _device_parity(actual, expected, *grown)
    if parity.agrees and not all(bound <= most for bound, most in zip(grown, useful, strict=True)):
        raise ArithmeticError(
            f"rounding alone changes the loss by {cpu.loss_error:.1e} and a gradient by {cpu.gradient_error:.1e}"
        )
    return parity


def repeat_difference(first: LossAndGradients, second: LossAndGradients) -> str | None:
    """Describe how two passes over the same micro-batch differ. Return None if every bit is the same.

    A difference is not an error, because the order of sums is not deterministic on some devices.
    """
    before = {**first.gradients, "the loss": first.loss}
    after = {**second.gradients, "the loss": second.loss}
    different = [n for n in before if n not in after or not same_bits(before[n], after[n])]
    if not different:
        return None
    worst = max(relative_errors(after, before).values())
    return f"different bits when repeated, in {len(different)} of {len(before)} tensors, by {worst:.0e}"


def _on_cpu(
    model: nn.Module,
    loss: MicroLoss,
    micro: MicroBatch,
    draws: RecordedDraws,
    *,
    precision: str = "fp32",
    dtype: torch.dtype | None = None,
) -> LossAndGradients:
    cpu = CpuDevice()
    with temporary_copy(model, cpu.torch_device, dtype):
        moved = micro.map_tensors(lambda tensor: cast_floating(tensor.cpu(), dtype))
        return loss_and_gradients(model, cpu, loss, moved, precision=precision, draws=draws)


def _device_parity(
    actual: LossAndGradients, expected: LossAndGradients, loss_bound: float, gradient_bound: float
) -> DeviceParity:
    errors = relative_errors(actual.gradients, expected.gradients)
    worst = max(errors, key=lambda name: errors[name]) if errors else ""
    return DeviceParity(
        device_loss=float(actual.loss),
        cpu_loss=float(expected.loss),
        loss_error=relative_error(actual.loss, expected.loss, floor=MIN_LOSS_SCALE),
        loss_bound=loss_bound,
        gradient_error=errors.get(worst, 0.0),
        gradient_bound=gradient_bound,
        worst=worst,
        num_gradients=len(expected.gradients),
    )
