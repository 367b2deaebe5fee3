"""Find the largest micro-batch that fits into the memory of each machine."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from torch import nn

from whet.base.model import FrozenModel
from whet.base.units import GB, format_bytes
from whet.machine.facts import Machine
from whet.machine.known import example_machine_names, load_machine
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
    """Whether a model can be trained in the memory of a machine, and with which micro-batch."""

    machine: str
    memory_bytes: int | None
    """Memory of the accelerator, or of the machine if the memory is shared. None if unknown."""
    device: str
    precision: str
    is_checkpointed: bool
    micro_batch: int | None
    """Largest even split of the global batch that fits, or None if none fits or the memory is unknown."""
    least: int
    """Smallest possible micro-batch: 1, or the global batch if the model has BatchNorm and cannot be split."""
    num_bytes: int
    """Memory of a step with `micro_batch`, or with `least` if that is None."""
    limit_bytes: int | None
    """Memory limit of the plan, or None if the memory of the machine is unknown."""
    micro_batch_checkpointed: int | None = None
    """Largest micro-batch that fits with activation checkpointing. Computed only if none fits without it."""

    @property
    def summary(self) -> str:
        """The fit in one line of text, such as the micro-batch and the memory it needs."""
        named = f"{self.machine} ({format_bytes(self.memory_bytes)})" if self.memory_bytes else self.machine
        needs = format_bytes(self.num_bytes)
        if self.limit_bytes is None:
            return f"{named}: a step with {self.least} needs {needs}; the machine's memory is unknown"
        limit = format_bytes(self.limit_bytes)
        # Show a common unit once, as in "3.9 of 5.3 GB".
        needs = needs.removesuffix(f" {limit.split()[-1]}")
        if self.micro_batch is not None:
            return f"fits {named} at micro batch {self.micro_batch}: {needs} of {limit}"
        what = "one sample needs" if self.least == 1 else f"the {self.least} samples that cannot be split need"
        line = f"does not fit {named}: {what} {needs} of {limit}"
        if self.micro_batch_checkpointed is None:
            return line
        return f"{line}; with activation_checkpointing=on {self.micro_batch_checkpointed} fit"


def known_machines() -> tuple[Machine, ...]:
    """Return the machines that have a file. They are few, because a check prints a line for each."""
    return tuple(load_machine(name) for name in example_machine_names())


def fit_machines(
    spec: TrainableSpec,
    machines: Sequence[Machine] | None = None,
    *,
    global_batch_size: int | None = None,
    overrides: Mapping[str, Scalar] | None = None,
    trainable: Trainable | None = None,
) -> tuple[MachineFit, ...]:
    """Find the largest micro-batch that fits for each machine.

    The device, precision and memory limit are those of the plan for the machine with these overrides. If `machines` is
    None, use all machines that have a file. Pass `trainable` if it has already been created from the spec.
    """
    workload, has_blocks = _describe(spec, trainable, global_batch_size)

    @cache
    def estimate(device: str, precision: str, kernels: str, is_checkpointed: bool) -> MemoryEstimate:
        return estimate_memory(
            spec, device=device, precision=precision, kernels=kernels, activation_checkpointing=is_checkpointed
        )

    fits = []
    for machine in known_machines() if machines is None else machines:
        plan = make_plan(machine, workload, overrides=overrides)
        fits.append(_fit(plan, estimate, has_blocks=has_blocks))
    return tuple(fits)


def _fit(plan: Plan, estimate: Callable[[str, str, str, bool], MemoryEstimate], *, has_blocks: bool) -> MachineFit:
    device = plan.device.partition(":")[0]
    precision, kernels = plan.precision, plan.optimizer_kernels
    is_checkpointed = has_blocks and plan.activation_checkpointing == "on"
    limit = None if plan.memory_gb is None else int(plan.memory_gb * GB)
    global_batch = plan.workload.global_batch_size
    least = global_batch if plan.workload.whole_batch_reason else 1

    def needed(size: int, is_checkpointed: bool) -> int:
        memory = estimate(device, precision, kernels, is_checkpointed)
        return memory.bytes_at(size, is_split=size < global_batch) + CONTEXT_BYTES.get(device, 0)

    def largest(is_checkpointed: bool) -> int | None:
        if limit is None:
            return None
        # Remove duplicates, because many splits of a large batch have the same micro-batch size.
        sizes = (size for size in dict.fromkeys(even_splits(global_batch)) if size >= least)
        return next((size for size in sizes if needed(size, is_checkpointed) <= limit), None)

    micro_batch = largest(is_checkpointed)
    could_checkpoint = has_blocks and not is_checkpointed and micro_batch is None and limit is not None
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
        micro_batch_checkpointed=largest(True) if could_checkpoint else None,
    )


def _describe(spec: TrainableSpec, trainable: Trainable | None, global_batch_size: int | None) -> tuple[Workload, bool]:
    """Return the workload of a model, and whether it has blocks for activation checkpointing."""
    if trainable is None:
        with fake_mode():
            trainable = spec.make()
    model = trainable.model
    workload = Workload(
        recipe=spec.name,
        num_parameters=max(1, sum(p.numel() for p in model.parameters() if p.requires_grad)),
        num_frozen=sum(p.numel() for p in model.parameters() if not p.requires_grad),
        global_batch_size=global_batch_size or trainable.batch_size,
        has_batchnorm=any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()),
    )
    return workload, bool(find_blocks(model))
