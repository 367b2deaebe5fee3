"""From a plan to the parts of a session: the device, the data, the schedule and the code that steps."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from whet.checkpoint.randomness import seed_randomness
from whet.data.mapped import Loading
from whet.data.open import open_source
from whet.data.source import AbstractSource, refuse_too_short
from whet.device.abstract import AbstractDevice
from whet.device.open import open_device
from whet.engine.schedule import Schedule
from whet.engine.training import Training
from whet.plan.plan import Plan
from whet.step.ema import Ema
from whet.step.optimizer import OptimizerChoice, make_optimizer
from whet.step.step import Stepper


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a session steps with."""

    device: AbstractDevice
    fell_back: str | None
    """Why the device is not the one that was asked for; None when it is."""
    source: AbstractSource
    schedule: Schedule
    total_steps: int | None
    stepper: Stepper


def build(model: nn.Module, optimizer: Optimizer | OptimizerChoice, data: Any, training: Training, plan: Plan) -> Parts:
    """Opens the device, moves the model, reads the data; everything that can be wrong is refused here."""
    device, fell_back = use_device(plan)
    seed_randomness(training.seed)
    source = open_source(
        data,
        device,
        global_batch_size=training.global_batch_size,
        seed=training.seed,
        shuffle=training.shuffle,
        is_resident=plan.value("data_home") == "device",
        loading=Loading(
            workers=int(plan.value("workers") or 0),
            start=str(plan.value("worker_start")),
            prefetch=int(plan.value("prefetch") or 2),
        ),
    )
    refuse_too_short(source.num_samples, training.global_batch_size)
    total_steps = training.total_steps(source.num_samples)
    schedule = training.make_schedule(total_steps)
    model.to(device.place)
    if isinstance(optimizer, OptimizerChoice):
        optimizer = make_optimizer(optimizer, model, device, kernels=str(plan.value("optimizer_kernels")))
    stepper = Stepper(
        model,
        optimizer,
        device,
        precision=str(plan.value("precision")),
        loss_scaling=str(plan.value("loss_scaling")),
        clip=training.clip,
        ema=Ema(model) if training.ema else None,
    )
    return Parts(
        device=device,
        fell_back=fell_back,
        source=source,
        schedule=schedule,
        total_steps=total_steps,
        stepper=stepper,
    )


def use_device(plan: Plan) -> tuple[AbstractDevice, str | None]:
    """Opens the planned device and sets what holds for the whole process; why it is another one, or None."""
    threads = plan.value("threads")
    if isinstance(threads, int):
        torch.set_num_threads(threads)
    opened = open_device(
        str(plan.value("device")),
        on_failure=str(plan.value("on_device_failure")),
        overlaps_copies=plan.value("copies") == "overlapped",
    )
    opened.device.use_precision(str(plan.value("precision")))
    asked = plan.wishes.get("device")
    is_another = asked is not None and str(asked).partition(":")[0] != opened.device.kind
    return opened.device, opened.fell_back or (plan.settings["device"].reason if is_another else None)
