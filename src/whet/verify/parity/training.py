"""Does a model train on a device as it does on the CPU? Loss, every gradient, the update, and a number of steps."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from whet.base.record import Record
from whet.device.abstract import AbstractDevice
from whet.device.cpu import Cpu
from whet.verify.agreement import Error, bound_of, errors_by_name
from whet.verify.parity.placing import Bench, Placed

LEAST = {"loss": 1e-4, "gradients": 1e-4, "buffers": 1e-4, "update": 1e-4, "trajectory": 1e-2}
"""Errors up to here count as agreement, whatever the CPU's own are."""
ALONE = {"loss": 1e-4, "gradients": 1e-3, "buffers": 1e-4, "update": 1e-2, "trajectory": 5e-2}
"""The same where the CPU's own error is not known: float32 alone is compared."""


class Compared(Record):
    """One quantity, on the device and as it should be."""

    what: str
    error: Error
    bound: Error
    own_error: Error | None = None
    """The CPU's own error in the device's number format, against float64."""
    worst: str | None = None
    """The tensor that errs most."""
    num_tensors: int = 1

    @property
    def agrees(self) -> bool:
        # A NaN is over every bound.
        return self.error <= self.bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a model computed in one place, on the CPU for comparing."""

    loss: Tensor
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    update: Mapping[str, Tensor]
    trajectory: Mapping[str, Tensor]

    def parts(self) -> dict[str, Mapping[str, Tensor]]:
        return {
            "loss": {"loss": self.loss},
            "gradients": self.gradients,
            "buffers": self.buffers,
            "update": self.update,
            "trajectory": self.trajectory,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """All quantities, and what they were compared with."""

    rows: tuple[Compared, ...]
    reference: str
    why_not_wide: str | None = None
    """Why the model does not run in float64."""


def compare_training(
    bench: Bench, device: AbstractDevice, *, steps: int, say: Callable[[str], None] = lambda _: None
) -> Parity:
    """The device against the CPU in float64; against its float32 where the model does not run in float64."""
    cpu, why_not = Cpu(), None
    say("float64 on the CPU ...")
    try:
        reference = train(bench, cpu, steps=steps, wide=True)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        why_not = str(error).splitlines()[0][:200]
    say("float32 on the CPU ...")
    narrow = train(bench, cpu, steps=steps, gradients=None if why_not else reference.gradients)
    if why_not is not None:
        reference = narrow
    if device.kind == "cpu":
        rows = () if why_not else _rows(narrow, reference, own=None)
    else:
        say(f"{device.kind} ...")
        here = train(bench, device, steps=steps, gradients=reference.gradients)
        rows = _rows(here, reference, own=None if why_not else narrow)
    return Parity(rows=rows, reference="cpu float32" if why_not else "cpu float64", why_not_wide=why_not)


def train(
    bench: Bench,
    device: AbstractDevice,
    *,
    steps: int,
    wide: bool = False,
    gradients: Mapping[str, Tensor] | None = None,
) -> Trained:
    """Everything that is compared, in one place; the update is made from `gradients`, or else from its own."""
    with bench.at(device, wide=wide) as placed:
        # A rate of 0: the pass alone, made by the code that trains.
        stepper = placed.stepper(torch.optim.SGD(placed.model.parameters(), lr=0.0))
        loss = _kept(placed.step(stepper).loss)
        own = {name: _kept(p.grad) for name, p in placed.model.named_parameters() if p.grad is not None}
        buffers = {name: _kept(b) for name, b in placed.model.named_buffers() if b.is_floating_point()}
    with bench.at(device, wide=wide) as placed:
        update = _update(placed, gradients or own)
    with bench.at(device, wide=wide) as placed:
        stepper = placed.stepper(placed.optimizer())
        losses = [placed.step(stepper, number).loss for number in range(1, steps + 1)]
        trajectory = torch.stack([_kept(loss) for loss in losses])
    return Trained(loss=loss, gradients=own, buffers=buffers, update=update, trajectory={"losses": trajectory})


def _update(placed: Placed, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """How two steps change the weights, from the same gradients everywhere: those of another place would differ by
    rounding, and an adaptive optimizer makes whole steps of that."""
    optimizer = placed.optimizer()
    named = {name: p for name, p in placed.model.named_parameters() if name in gradients}
    before = {name: _kept(p) for name, p in named.items()}
    for name, parameter in named.items():
        parameter.grad = placed.device.put(gradients[name].float().to(parameter.dtype))
    with placed.device.computing(is_step=True):
        for _ in range(2):
            optimizer.step()
    return {name: _kept(p).double() - before[name].double() for name, p in named.items()}


def _rows(here: Trained, reference: Trained, *, own: Trained | None) -> tuple[Compared, ...]:
    rows = []
    for what, expected in reference.parts().items():
        if not expected and not here.parts()[what]:
            continue
        errors = errors_by_name(here.parts()[what], expected)
        own_error = None if own is None else max(errors_by_name(own.parts()[what], expected).values(), default=0.0)
        worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
        rows.append(
            Compared(
                what=what,
                error=errors[worst],
                bound=bound_of((ALONE if own is None else LEAST)[what], own_error),
                own_error=own_error,
                worst=worst if len(errors) > 1 else None,
                num_tensors=len(errors),
            )
        )
    return tuple(rows)


def _kept(tensor: Tensor) -> Tensor:
    # .cpu() of a tensor on the CPU is the tensor itself, which later steps change.
    return tensor.detach().cpu().clone()
