"""The same model with the same weights and the same batch, on any device and in any number format."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.base.errors import UsageError
from whet.checkpoint.randomness import seed_randomness, undisturbed
from whet.data.batch import Micro
from whet.device.abstract import AbstractDevice
from whet.device.cpu import Cpu
from whet.step.optimizer import make_optimizer
from whet.step.step import Outcome, Stepper
from whet.verify.subject import Specimen, Subject
from whet.verify.untouched import uncompiled
from whet.verify.without_dropout import without_dropout

_SEED = 0
_MANY = 32
"""As many samples at most, unless asked for more: a wrong operator shows with few."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A fresh copy of the model on a device."""

    specimen: Specimen
    micro: Micro
    device: AbstractDevice

    @property
    def model(self) -> nn.Module:
        return self.specimen.model

    def optimizer(self) -> Optimizer:
        """The optimizer that a training would have here."""
        return make_optimizer(self.specimen.optimizer, self.model, self.device)

    def stepper(self, optimizer: Optimizer) -> Stepper:
        return Stepper(self.model, optimizer, self.device)

    def step(self, stepper: Stepper, number: int = 1) -> Outcome:
        """One real step on the whole micro-batch."""
        return stepper(self.specimen.loss, [self.micro], num_samples=len(self.micro), step=number)


class Bench:
    """Makes a model once, and then copies of it that differ in nothing but the place."""

    def __init__(self, subject: Subject, *, size: int | None = None) -> None:
        self._subject = subject
        with undisturbed(Cpu()):
            seed_randomness(_SEED)
            first = subject.make()
        if size is not None and size != first.size and not first.is_scalable:
            raise UsageError(
                "this model's inputs cannot be cut to another size", got=f"--size {size}", try_=f"--size {first.size}"
            )
        wanted = size or (min(first.size, _MANY) if first.is_scalable else first.size)
        self.micro = first.micro(wanted)
        # Some data has fewer samples than were asked for.
        self.size = len(self.micro)
        if not any(parameter.requires_grad for parameter in first.model.parameters()):
            raise UsageError("the model has nothing to train", got="no parameter", try_="a model with weights")
        self.number_formats = {p.dtype for p in first.model.parameters() if p.is_floating_point()}
        self._weights = {name: tensor.detach().clone() for name, tensor in named_tensors(first.model)}

    @contextmanager
    def at(self, device: AbstractDevice, *, wide: bool = False, dropout: bool = False) -> Iterator[Placed]:
        """A copy on a device, in its own number formats or in float64; float32 products are not rounded to tf32."""
        with ExitStack() as stack:
            stack.enter_context(undisturbed(device))
            stack.enter_context(uncompiled())
            stack.enter_context(device.keeping_precision())
            device.use_precision("fp32")
            seed_randomness(_SEED)
            specimen = self._subject.make()
            with torch.no_grad():
                for name, tensor in named_tensors(specimen.model):
                    tensor.copy_(self._weights[name])
            if wide:
                specimen.model.double()
            device.put_model(specimen.model)
            specimen.model.train()
            if not dropout:
                stack.enter_context(without_dropout(specimen.model))
            seed_randomness(_SEED)

            def put(tensor: Tensor) -> Tensor:
                return device.put(tensor.double() if wide and tensor.is_floating_point() else tensor)

            def loss(micro: Micro) -> Any:
                # Copied: a model may write to its inputs, and in training every step has fresh ones.
                return own_loss(micro.moved(torch.clone))

            own_loss, specimen = specimen.loss, replace(specimen, loss=loss)
            yield Placed(specimen=specimen, micro=self.micro.moved(put), device=device)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers."""
    return chain(model.named_parameters(), model.named_buffers())
