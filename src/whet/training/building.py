"""Build the parts of a run from its plan: device, data, schedule and stepper."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from whet.base.errors import UsageError
from whet.data.adapters import AbstractSource, LoaderConfig, check_dataset_size, open_source
from whet.data.split import RankShare
from whet.device.abstract import AbstractDevice
from whet.device.environment import FALLBACK, has_fallback
from whet.device.open import open_device, rank_device
from whet.device.rng import seed_everything
from whet.distributed.group import RankGroup
from whet.distributed.ranks import RankInfo
from whet.distributed.strategies import ParallelStrategy, ReplicatedStrategy
from whet.plan.plan import Plan, override
from whet.step.apply_plan import build_stepper, place_model, set_process_settings
from whet.step.model_contexts import WeightLayout, find_blocks
from whet.step.optimizers import OptimizerChoice
from whet.step.step import Stepper
from whet.training.checks import check_multi_rank, check_parameters_owned, check_ranks_agree
from whet.training.schedule import LearningRateSchedule
from whet.training.training_config import TrainingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingParts:
    """What a session steps with."""

    plan: Plan
    """Another than the one given where the device could not be used."""
    device: AbstractDevice
    fell_back: str | None
    """Why the device is not the one that was asked for; None when it is."""
    source: AbstractSource
    schedule: LearningRateSchedule
    total_steps: int | None
    stepper: Stepper
    base_rates: list[float]
    layout: WeightLayout
    """As the weights were found, to be put back."""
    group: RankGroup
    """The processes that share each global batch."""
    seed: int


def build(
    model: nn.Module,
    optimizer: Optimizer | OptimizerChoice,
    data: Any,
    training: TrainingConfig,
    plan: Plan,
    *,
    source: AbstractSource | None = None,
    layout: WeightLayout | None = None,
    group: RankGroup | None = None,
) -> TrainingParts:
    """Opens the device, moves the model, reads the data; everything that can be wrong is refused here.

    `source` is the data as the plan says, if it is open already; `layout` is the model's own, where it may be another
    one now. `group` are the processes that train it together; this one alone if not given.
    """
    group = group or RankGroup(RankInfo())
    check_multi_rank(model, optimizer, plan, group.world)
    plan, device, fell_back = use_device(plan, group.world)
    group.use_device(device)
    seed_everything(training.seed)
    source = source or open_source_for_plan(
        data,
        device,
        plan,
        global_batch_size=training.global_batch_size,
        seed=training.seed,
        shuffle=training.shuffle,
        share=RankShare(rank=group.world.rank, size=group.world.size),
    )
    check_dataset_size(source.num_samples, training.global_batch_size)
    check_ranks_agree(group, model, optimizer, source, training)
    total_steps = training.total_steps(source.num_samples)
    schedule = training.make_schedule(total_steps)
    own = optimizer if isinstance(optimizer, Optimizer) else None
    layout = place_model(plan, model, device, optimizer=own, layout=layout)
    strategy = _make_strategy(model, group, plan, device)
    if own is not None:
        check_parameters_owned(model, own)
    stepper, base_rates = build_stepper(
        plan, model, optimizer, device, clip=training.clip, has_ema=training.ema, strategy=strategy
    )
    return TrainingParts(
        plan=plan,
        device=device,
        fell_back=fell_back,
        source=source,
        schedule=schedule,
        total_steps=total_steps,
        stepper=stepper,
        base_rates=base_rates,
        layout=layout,
        group=group,
        seed=training.seed,
    )


def _make_strategy(model: nn.Module, group: RankGroup, plan: Plan, device: AbstractDevice) -> ParallelStrategy:
    """How several processes make one step; the first weights are those of the first process."""
    if group.is_alone:
        return ParallelStrategy()
    group.same(model)
    if plan.sharding == "full":
        # Loaded where it is needed: it brings half of torch along.
        from whet.distributed.sharded import ShardedStrategy

        return ShardedStrategy(model, group, blocks=find_blocks(model), kind=device.kind)
    bucket = plan.bucket_mb
    return ReplicatedStrategy(model, group, bucket_mb=float(bucket) if isinstance(bucket, int) else 25.0)


def open_source_for_plan(
    data: Any,
    device: AbstractDevice,
    plan: Plan,
    *,
    global_batch_size: int,
    seed: int = 0,
    shuffle: bool = False,
    share: RankShare | None = None,
) -> AbstractSource:
    """Data as the plan says: on the device or not, read by workers or here."""
    return open_source(
        data,
        device,
        global_batch_size=global_batch_size,
        seed=seed,
        shuffle=shuffle,
        is_resident=plan.data_location == "device",
        loading=LoaderConfig(
            workers=int(plan.workers or 0),
            start=plan.worker_start_method,
            prefetch=int(plan.prefetch or 2),
        ),
        share=share,
    )


def use_device(plan: Plan, world: RankInfo | None = None) -> tuple[Plan, AbstractDevice, str | None]:
    """Opens the planned device and sets what holds for the whole process. Of several processes each has its own GPU.

    Where it cannot be opened and on_device_failure=cpu, the plan is made anew for the CPU, and the reason is given.
    """
    opened = open_device(
        rank_device(plan.device, 0 if world is None or world.is_alone else world.local_rank),
        on_failure=plan.on_device_failure,
        overlaps_copies=plan.copies == "overlapped",
    )
    reason = opened.fell_back
    if reason is not None:
        plan = override(plan, {"device": "cpu"})
    elif str(plan.overrides.get("device", opened.device.kind)).partition(":")[0] != opened.device.kind:
        reason = plan.settings["device"].reason
    if plan.mps_fallback == "on" and opened.device.kind == "mps" and not has_fallback():
        raise UsageError(
            "mps_fallback must be set before torch starts",
            got=f"mps_fallback=on, and no {FALLBACK} in the environment",
            try_=f"{FALLBACK}=1 python ..., or whet train, which sets it",
        )
    set_process_settings(plan, opened.device)
    return plan, opened.device, reason
