"""Train identical replicas of a model on two devices and compare the results."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.base.errors import UsageError
from whet.base.model import FrozenModel
from whet.data.batch import MicroBatch
from whet.device.abstract import AbstractDevice
from whet.device.cpu import CpuDevice
from whet.device.rng import preserve_rng, seed_everything
from whet.step.optimizers import build_optimizer
from whet.step.step import Outcome, Stepper
from whet.verify.isolation import disable_dropout, force_eager
from whet.verify.tolerance import RelativeError, error_bound, relative_errors
from whet.verify.trainable import Trainable, TrainableSpec

_SEED = 0
_MAX_DEFAULT_SAMPLES = 32
"""As many samples at most, unless asked for more: a wrong operator shows with few."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """A fresh copy of the model on a device."""

    specimen: Trainable
    micro: MicroBatch
    device: AbstractDevice

    @property
    def model(self) -> nn.Module:
        return self.specimen.model

    def optimizer(self) -> Optimizer:
        """The optimizer that a training would have here."""
        return build_optimizer(self.specimen.optimizer, self.model, self.device)

    def stepper(self, optimizer: Optimizer) -> Stepper:
        return Stepper(self.model, optimizer, self.device)

    def step(self, stepper: Stepper, number: int = 1) -> Outcome:
        """One real step on the whole micro-batch."""
        return stepper(self.specimen.loss, [self.micro], num_samples=len(self.micro), step=number)


class ReplicaFactory:
    """Makes a model once, and then copies of it that differ in nothing but the place."""

    def __init__(self, subject: TrainableSpec, *, size: int | None = None) -> None:
        self._subject = subject
        with preserve_rng(CpuDevice()):
            seed_everything(_SEED)
            first = subject.make()
        if size is not None and size != first.size and not first.is_scalable:
            raise UsageError(
                "this model's inputs cannot be cut to another size", got=f"--size {size}", try_=f"--size {first.size}"
            )
        wanted = size or (min(first.size, _MAX_DEFAULT_SAMPLES) if first.is_scalable else first.size)
        self.micro = first.micro(wanted)
        # Some data has fewer samples than were asked for.
        self.size = len(self.micro)
        if not any(parameter.requires_grad for parameter in first.model.parameters()):
            raise UsageError("the model has nothing to train", got="no parameter", try_="a model with weights")
        self.number_formats = {p.dtype for p in first.model.parameters() if p.is_floating_point()}
        self._weights = {name: tensor.detach().clone() for name, tensor in named_tensors(first.model)}

    @contextmanager
    def at(self, device: AbstractDevice, *, wide: bool = False, dropout: bool = False) -> Iterator[Replica]:
        """A copy on a device, in its own number formats or in float64; float32 products are not rounded to tf32."""
        with ExitStack() as stack:
            stack.enter_context(preserve_rng(device))
            stack.enter_context(force_eager())
            stack.enter_context(device.keeping_precision())
            device.use_precision("fp32")
            seed_everything(_SEED)
            specimen = self._subject.make()
            with torch.no_grad():
                for name, tensor in named_tensors(specimen.model):
                    tensor.copy_(self._weights[name])
            if wide:
                specimen.model.double()
            device.put_model(specimen.model)
            specimen.model.train()
            if not dropout:
                stack.enter_context(disable_dropout(specimen.model))
            seed_everything(_SEED)

            def put(tensor: Tensor) -> Tensor:
                return device.put(tensor.double() if wide and tensor.is_floating_point() else tensor)

            def loss(micro: MicroBatch) -> Any:
                # Copied: a model may write to its inputs, and in training every step has fresh ones.
                return own_loss(micro.moved(torch.clone))

            own_loss, specimen = specimen.loss, replace(specimen, loss=loss)
            yield Replica(specimen=specimen, micro=self.micro.moved(put), device=device)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers."""
    return chain(model.named_parameters(), model.named_buffers())


MIN_BOUNDS = {"loss": 1e-4, "gradients": 1e-4, "buffers": 1e-4, "update": 1e-4, "trajectory": 1e-2}
"""Errors up to here count as agreement, whatever the CPU's own are."""
BOUNDS_WITHOUT_FLOAT64 = {"loss": 1e-4, "gradients": 1e-3, "buffers": 1e-4, "update": 1e-2, "trajectory": 5e-2}
"""The same where the CPU's own error is not known: float32 alone is compared."""


class ParityRow(FrozenModel):
    """One quantity, on the device and as it should be."""

    what: str
    error: RelativeError
    bound: RelativeError
    own_error: RelativeError | None = None
    """The CPU's own error in the device's number format, against float64."""
    worst: str | None = None
    """The tensor that errs most."""
    num_tensors: int = 1

    @property
    def agrees(self) -> bool:
        # A NaN is over every bound.
        return self.error <= self.bound


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingTrace:
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
class TrainingParity:
    """All quantities, and what they were compared with."""

    rows: tuple[ParityRow, ...]
    reference: str
    why_not_wide: str | None = None
    """Why the model does not run in float64."""


def compare_training(
    bench: ReplicaFactory, device: AbstractDevice, *, steps: int, say: Callable[[str], None] = lambda _: None
) -> TrainingParity:
    """The device against the CPU in float64; against its float32 where the model does not run in float64."""
    cpu, why_not = CpuDevice(), None
    say("float64 on the CPU ...")
    try:
        reference = record_training(bench, cpu, steps=steps, wide=True)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        why_not = str(error).splitlines()[0][:200]
    say("float32 on the CPU ...")
    narrow = record_training(bench, cpu, steps=steps, gradients=None if why_not else reference.gradients)
    if why_not is not None:
        reference = narrow
    if device.kind == "cpu":
        rows = () if why_not else _rows(narrow, reference, own=None)
    else:
        say(f"{device.kind} ...")
        here = record_training(bench, device, steps=steps, gradients=reference.gradients)
        rows = _rows(here, reference, own=None if why_not else narrow)
    return TrainingParity(rows=rows, reference="cpu float32" if why_not else "cpu float64", why_not_wide=why_not)


def record_training(
    bench: ReplicaFactory,
    device: AbstractDevice,
    *,
    steps: int,
    wide: bool = False,
    gradients: Mapping[str, Tensor] | None = None,
) -> TrainingTrace:
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
    return TrainingTrace(loss=loss, gradients=own, buffers=buffers, update=update, trajectory={"losses": trajectory})


def _update(placed: Replica, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
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


def _rows(here: TrainingTrace, reference: TrainingTrace, *, own: TrainingTrace | None) -> tuple[ParityRow, ...]:
    rows = []
    for what, expected in reference.parts().items():
        if not expected and not here.parts()[what]:
            continue
        errors = relative_errors(here.parts()[what], expected)
        own_error = None if own is None else max(relative_errors(own.parts()[what], expected).values(), default=0.0)
        worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
        rows.append(
            ParityRow(
                what=what,
                error=errors[worst],
                bound=error_bound((BOUNDS_WITHOUT_FLOAT64 if own is None else MIN_BOUNDS)[what], own_error),
                own_error=own_error,
                worst=worst if len(errors) > 1 else None,
                num_tensors=len(errors),
            )
        )
    return tuple(rows)


def _kept(tensor: Tensor) -> Tensor:
    # .cpu() of a tensor on the CPU is the tensor itself, which later steps change.
    return tensor.detach().cpu().clone()
