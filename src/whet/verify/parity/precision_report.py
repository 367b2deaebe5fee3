"""Is a lower precision good enough for a model? Its loss and gradients there, against float32 on the same device."""

import torch
from pydantic import Field
from torch import Tensor, nn

from whet.base.errors import UsageError
from whet.base.record import Record
from whet.data.batch import Micro
from whet.device.abstract import AbstractDevice
from whet.step.loss import LossFunction, at_least_tiny, split_loss
from whet.verify.agreement import Error, error_of, errors_by_name
from whet.verify.untouched import untouched
from whet.verify.without_dropout import without_dropout

LOSS_BOUNDS = {"bf16": 2e-2, "fp16": 5e-3, "tf32": 5e-3}
GRADIENT_BOUNDS = {"bf16": 2e-1, "fp16": 1e-1, "tf32": 1e-1}
"""The largest relative errors that count as agreement. bf16 keeps 8 bits of a number, fp16 and tf32 keep 11; sound
transformers show 0.06 and 0.002, convnets with max-pooling 0.1 and 0.06, since rounding decides what is pooled."""
_SCALES = (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)
"""A loss scaler finds the largest that does not overflow; so do we."""


class PrecisionAgreement(Record):
    """What a precision does to one pass of a model, dropout off."""

    precision: str
    loss_error: Error
    loss_bound: Error
    gradient_error: Error
    """Of the worst gradient."""
    bound: Error
    """For the gradients."""
    worst: str | None = None
    by_module: dict[str, Error] = Field(default_factory=dict)
    """The worst gradient of each module that has weights of its own."""

    @property
    def agrees(self) -> bool:
        return self.loss_error <= self.loss_bound and self.gradient_error <= self.bound


def precision_agreement(
    model: nn.Module, loss: LossFunction, micro: Micro, device: AbstractDevice, precision: str
) -> PrecisionAgreement:
    """One pass in `precision` (bf16, fp16 or tf32) and one in fp32, on the device where the model is.

    Weights, buffers, gradients, modes and generators are as before afterwards.
    """
    if precision not in GRADIENT_BOUNDS:
        raise UsageError("no such precision to compare", got=precision, try_=" or ".join(GRADIENT_BOUNDS))
    moved = micro.moved(device.put)
    with untouched(model, device):
        expected_loss, expected = _pass(model, loss, moved, device, "fp32")
    with untouched(model, device):
        found_loss, found = _pass(model, loss, moved, device, precision)
    errors = errors_by_name(found, expected)
    worst = max(errors, key=lambda name: errors[name], default=None)
    by_module: dict[str, float] = {}
    for name, error in errors.items():
        module = name.rpartition(".")[0]
        by_module[module] = max(error, by_module.get(module, 0.0))
    return PrecisionAgreement(
        precision=precision,
        loss_error=error_of(found_loss, expected_loss),
        loss_bound=LOSS_BOUNDS[precision],
        gradient_error=0.0 if worst is None else errors[worst],
        bound=GRADIENT_BOUNDS[precision],
        worst=worst,
        by_module=by_module,
    )


def _pass(
    model: nn.Module, loss: LossFunction, micro: Micro, device: AbstractDevice, precision: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and every gradient, on the CPU, in training mode and without dropout. Only inside `untouched`."""
    model.train()
    with device.keeping_precision(), without_dropout(model):
        device.use_precision(precision)
        with device.computing(), device.autocast(precision):
            total, weight = split_loss(loss(micro))
        total = total if weight is None else total / at_least_tiny(weight)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for scale in _SCALES if precision == "fp16" else (1.0,):
            gradients = torch.autograd.grad(total * scale, list(named.values()), retain_graph=True, allow_unused=True)
            found = {n: g.detach().cpu() / scale for n, g in zip(named, gradients, strict=True) if g is not None}
            if all(bool(gradient.isfinite().all()) for gradient in found.values()):
                break
    return total.detach().cpu(), found
