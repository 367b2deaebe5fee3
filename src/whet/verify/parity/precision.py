"""Compare a lower precision with fp32 on the same device."""

from collections.abc import Mapping
from functools import partial

import torch
from pydantic import Field
from torch import Tensor, nn

from whet.base.errors import UsageError
from whet.base.model import FrozenModel
from whet.data.batch import MicroBatch
from whet.device.abstract import AbstractDevice
from whet.step.loss import MicroLoss, mean_loss
from whet.verify.draws import RecordedDraws
from whet.verify.isolation import disable_dropout, preserve_model_and_rng
from whet.verify.tolerance import RelativeError, relative_error, relative_errors

LOSS_BOUNDS = {"bf16": 2e-2, "fp16": 5e-3, "tf32": 5e-3}
# Maximum relative errors that count as agreement. bf16 has 8 significant bits, and fp16 and tf32 have 11. Correct
# transformers have errors of 0.06 and 0.002, respectively. Correct convnets with max-pooling have errors of 0.1 and
# 0.06, because rounding decides which value is pooled.
GRADIENT_BOUNDS = {"bf16": 2e-1, "fp16": 1e-1, "tf32": 1e-1}
# Number of bits of a float32 that rounding to these precisions drops.
_DROPPED_BITS = {"bf16": 16, "fp16": 13, "tf32": 13}
# A bound for errors of the loss and gradients, as a multiple of the error caused by rounding only the weights and
# inputs. It can only loosen the bounds above. A correct ResNet-50 reaches 1.8 in its first step, because each layer
# also rounds its activations.
_ROUNDING_FACTOR = 4.0
# Loss scales. Like a gradient scaler, try them in this order until no gradient overflows.
_LOSS_SCALES = (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)


class PrecisionResult(FrozenModel):
    """The result of comparing a forward and backward pass in a lower precision with fp32. Dropout is disabled."""

    precision: str
    loss_error: RelativeError
    loss_bound: RelativeError
    gradient_error: RelativeError
    """Error of the gradient with the largest ratio of error to bound."""
    bound: RelativeError
    """Bound of that gradient."""
    worst: str | None = None
    """Name of that gradient."""
    by_module: dict[str, RelativeError] = Field(default_factory=dict)
    """Largest gradient error of each module that directly contains weights."""

    @property
    def agrees(self) -> bool:
        return self.loss_error <= self.loss_bound and self.gradient_error <= self.bound


def compare_precision(
    model: nn.Module, loss: MicroLoss, micro: MicroBatch, device: AbstractDevice, precision: str
) -> PrecisionResult:
    """Compare a forward and backward pass in `precision` (bf16, fp16 or tf32) with one in fp32 on the same device.

    Both passes use the same random draws. Weights, buffers, gradients, training modes and random generators are
    restored.
    """
    if precision not in GRADIENT_BOUNDS:
        raise UsageError("unknown precision", got=precision, try_=" or ".join(GRADIENT_BOUNDS))
    moved, draws = micro.map_tensors(device.put), RecordedDraws()
    with preserve_model_and_rng(model, device), draws.record_or_repeat():
        expected_loss, expected = _loss_and_gradients(model, loss, moved, device, "fp32")
    with preserve_model_and_rng(model, device), draws.record_or_repeat():
        actual_loss, actual = _loss_and_gradients(model, loss, moved, device, precision)
    loss_error, errors = relative_error(actual_loss, expected_loss), relative_errors(actual, expected)
    loss_bound, bounds = LOSS_BOUNDS[precision], dict.fromkeys(errors, GRADIENT_BOUNDS[precision])
    if loss_error > loss_bound or any(error > GRADIENT_BOUNDS[precision] for error in errors.values()):
        # A deep network with BatchNorm amplifies rounding errors until the gradients of early layers are unrelated to
        # those of fp32. This happens in every precision, so derive a separate bound for each layer.
        for is_nearest in (True, False):
            with preserve_model_and_rng(model, device), draws.record_or_repeat():
                _round_weights(model, precision, is_nearest=is_nearest)
                inputs = moved.map_tensors(partial(_round, precision=precision, is_nearest=is_nearest))
                rounded_loss, rounded = _loss_and_gradients(model, loss, inputs, device, "fp32")
            loss_bound = max(loss_bound, _ROUNDING_FACTOR * relative_error(rounded_loss, expected_loss))
            rounding = _by_module(relative_errors(rounded, expected))
            bounds = {name: max(bound, _ROUNDING_FACTOR * rounding[_module_of(name)]) for name, bound in bounds.items()}
    worst = max(errors, key=lambda name: errors[name] / bounds[name], default=None)
    return PrecisionResult(
        precision=precision,
        loss_error=loss_error,
        loss_bound=loss_bound,
        gradient_error=0.0 if worst is None else errors[worst],
        bound=GRADIENT_BOUNDS[precision] if worst is None else bounds[worst],
        worst=worst,
        by_module=_by_module(errors),
    )


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _by_module(errors: Mapping[str, float]) -> dict[str, float]:
    """Return the largest error of each module that directly contains weights."""
    largest: dict[str, float] = {}
    for name, error in errors.items():
        module = _module_of(name)
        largest[module] = max(error, largest.get(module, 0.0))
    return largest


def _round_weights(model: nn.Module, precision: str, *, is_nearest: bool) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(_round(parameter, precision=precision, is_nearest=is_nearest))


def _round(tensor: Tensor, *, precision: str, is_nearest: bool) -> Tensor:
    """Round a float32 tensor to the significant bits of a precision, to nearest or toward zero.

    Return any other tensor unchanged.
    """
    if tensor.dtype != torch.float32:
        return tensor
    dropped = _DROPPED_BITS[precision]
    bits = tensor.detach().contiguous().view(torch.int32)
    return (bits + (1 << dropped - 1 if is_nearest else 0) & -(1 << dropped)).view(torch.float32)


def _loss_and_gradients(
    model: nn.Module, loss: MicroLoss, micro: MicroBatch, device: AbstractDevice, precision: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and gradients, moved to the CPU. The model remains in training mode. Dropout is disabled."""
    model.train()
    with device.preserve_precision(), disable_dropout(model):
        device.use_precision(precision)
        with device.compute_context(), device.autocast(precision):
            returned = loss(micro)
        total = mean_loss(returned)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for scale in _LOSS_SCALES if precision == "fp16" else (1.0,):
            grads = torch.autograd.grad(total * scale, list(named.values()), retain_graph=True, allow_unused=True)
            gradients = {n: g.detach().cpu() / scale for n, g in zip(named, grads, strict=True) if g is not None}
            if all(bool(gradient.isfinite().all()) for gradient in gradients.values()):
                break
    return total.detach().cpu(), gradients
