"""On which machines does a model's training fit, and with how many samples at once?"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from torch import nn

from whet.base.model import FrozenModel
from whet.base.units import GB, format_bytes
from whet.machine.facts import Conditions, Machine
from whet.machine.known import known_machine_names, load_machine
from whet.plan.memory import CONTEXT_BYTES
from whet.plan.plan import Plan, make_plan
from whet.plan.rules.memory import even_splits
from whet.plan.setting import Scalar
from whet.plan.workload import Workload
from whet.step.model_contexts import find_blocks
from whet.verify.fake_tensors import fake_mode
from whet.verify.memory.estimate import MemoryEstimate, estimate_memory
from whet.verify.trainable import Trainable, TrainableSpec


class MachineFit(FrozenModel):
    """One machine's answer."""

    machine: str
    memory_bytes: int | None
    """The machine's; the card's where it has its own."""
    device: str
    precision: str
    is_checkpointed: bool
    micro_batch: int | None
    """The most samples at once that fit, as the plan cuts the global batch; None where not even the least fit."""
    least: int
    """The fewest samples that may go through at once: 1, or the global batch where BatchNorm forbids a cut."""
    num_bytes: int
    """What a step takes with that many samples; with the least where none fit."""
    limit_bytes: int | None
    """What the plan allows; None where the memory is unknown."""
    micro_batch_checkpointed: int | None = None
    """How many would fit with activation checkpointing; asked only where none fit without."""

    @property
    def words(self) -> str:
        """The answer in one line."""
        named = f"{self.machine} ({format_bytes(self.memory_bytes)})" if self.memory_bytes else self.machine
        needs = format_bytes(self.num_bytes)
        if self.limit_bytes is None:
            return f"{named}: a step with {self.least} needs {needs}; how much there is, is unknown"
        limit = format_bytes(self.limit_bytes)
        # The unit once, where it is the same: 3.9 of 5.3 GB.
        needs = needs.removesuffix(f" {limit.split()[-1]}")
        if self.micro_batch is not None:
            return f"fits {named} at micro batch {self.micro_batch}: {needs} of {limit}"
        what = "one sample needs" if self.least == 1 else f"the {self.least} samples that may not be cut need"
        line = f"does not fit {named}: {what} {needs} of {limit}"
        if self.micro_batch_checkpointed is None:
            return line
        return f"{line}; with activation_checkpointing=on {self.micro_batch_checkpointed} fit"


def known_machines() -> tuple[Machine, ...]:
    """All that come with whet."""
    return tuple(load_machine(name) for name in known_machine_names())


def fit_machines(
    subject: TrainableSpec,
    machines: Sequence[Machine] | None = None,
    *,
    global_batch_size: int | None = None,
    overrides: Mapping[str, Scalar] | None = None,
    conditions: Conditions | None = None,
    specimen: Trainable | None = None,
) -> tuple[MachineFit, ...]:
    """For each machine, the known ones unless told otherwise: the most samples at once that its plan's limit allows.

    Device, precision and limit are those that the machine's plan would have with these wishes. `conditions` are what is
    free now, for the machine that this is; `specimen` is one of the subject, where it was made already.
    """
    workload, has_blocks = _describe(subject, specimen, global_batch_size)

    @cache
    def estimated(device: str, precision: str, kernels: str, is_checkpointed: bool) -> MemoryEstimate:
        return estimate_memory(
            subject,
            device=device,
            precision=precision,
            kernels=kernels,
            activation_checkpointing=is_checkpointed,
        )

    found = []
    for machine in known_machines() if machines is None else machines:
        plan = make_plan(machine, workload, overrides=overrides, conditions=conditions)
        found.append(_fit(plan, estimated, has_blocks=has_blocks))
    return tuple(found)


def _fit(plan: Plan, estimated: Callable[[str, str, str, bool], MemoryEstimate], *, has_blocks: bool) -> MachineFit:
    device = plan.device.partition(":")[0]
    precision, kernels = plan.precision, plan.optimizer_kernels
    is_checkpointed = has_blocks and plan.activation_checkpointing == "on"
    limit_gb = plan.memory_gb
    limit = int(limit_gb * GB) if isinstance(limit_gb, int | float) else None
    whole = plan.workload.global_batch_size
    least = whole if plan.workload.has_batchnorm else 1

    def needed(size: int, is_checkpointed: bool) -> int:
        guess = estimated(device, precision, kernels, is_checkpointed)
        return guess.bytes_at(size, is_cut=size < whole) + CONTEXT_BYTES.get(device, 0)

    def most(is_checkpointed: bool) -> int | None:
        if limit is None:
            return None
        # Of a large batch most cuts are of the same size.
        sizes = (size for size in dict.fromkeys(even_splits(whole)) if size >= least)
        return next((size for size in sizes if needed(size, is_checkpointed) <= limit), None)

    micro_batch = most(is_checkpointed)
    could_recompute = has_blocks and not is_checkpointed and micro_batch is None and limit is not None
    accelerator = plan.machine.accelerator(device)
    memory = accelerator.memory_bytes if accelerator is not None else None
    return MachineFit(
        machine=plan.machine.name,
        memory_bytes=memory or plan.machine.memory_bytes,
        device=device,
        precision=precision,
        is_checkpointed=is_checkpointed,
        micro_batch=micro_batch,
        least=least,
        num_bytes=needed(micro_batch or least, is_checkpointed),
        limit_bytes=limit,
        micro_batch_checkpointed=most(True) if could_recompute else None,
    )


def _describe(
    subject: TrainableSpec, specimen: Trainable | None, global_batch_size: int | None
) -> tuple[Workload, bool]:
    """What the plan must know of a model, and whether it has blocks that can be computed again."""
    if specimen is None:
        with fake_mode():
            specimen = subject.make()
    model = specimen.model
    workload = Workload(
        recipe=subject.name,
        num_parameters=max(1, sum(p.numel() for p in model.parameters() if p.requires_grad)),
        num_frozen=sum(p.numel() for p in model.parameters() if not p.requires_grad),
        global_batch_size=global_batch_size or specimen.size,
        has_batchnorm=any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()),
    )
    return workload, bool(find_blocks(model))
