"""From a plan to the parts of a session: the device, the data, the schedule and the code that steps."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from whet.base.errors import UsageError
from whet.checkpoint.randomness import seed_randomness
from whet.data.mapped import Loading
from whet.data.open import open_source
from whet.data.share import Share
from whet.data.source import AbstractSource, refuse_too_short
from whet.device.abstract import AbstractDevice
from whet.device.environment import FALLBACK, has_fallback
from whet.device.graphs import AbstractGraphs
from whet.device.open import open_device, own_card
from whet.device.threads import use_threads
from whet.engine.agreeing import refuse_disagreement
from whet.engine.refusals import refuse_foreign_parameters, refuse_in_several
from whet.engine.schedule import Schedule
from whet.engine.training import Training
from whet.plan.plan import Plan, override
from whet.step.blocks import find_blocks
from whet.step.ema import Ema
from whet.step.graphed import GraphedStepper
from whet.step.layout import Layout
from whet.step.optimizer import OptimizerChoice, make_optimizer
from whet.step.step import Stepper
from whet.world.group import Group
from whet.world.joining import Joining
from whet.world.replicated import Replicated
from whet.world.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a session steps with."""

    plan: Plan
    """Another than the one given where the device could not be used."""
    device: AbstractDevice
    fell_back: str | None
    """Why the device is not the one that was asked for; None when it is."""
    source: AbstractSource
    schedule: Schedule
    total_steps: int | None
    stepper: Stepper
    base_rates: list[float]
    layout: Layout
    """As the weights were found, to be put back."""
    group: Group
    """The processes that share each global batch."""
    seed: int


def build(
    model: nn.Module,
    optimizer: Optimizer | OptimizerChoice,
    data: Any,
    training: Training,
    plan: Plan,
    *,
    source: AbstractSource | None = None,
    layout: Layout | None = None,
    group: Group | None = None,
) -> Parts:
    """Opens the device, moves the model, reads the data; everything that can be wrong is refused here.

    `source` is the data as the plan says, if it is open already; `layout` is the model's own, where it may be another
    one now. `group` are the processes that train it together; this one alone if not given.
    """
    group = group or Group(World())
    refuse_in_several(model, optimizer, plan, group.world)
    plan, device, fell_back = use_device(plan, group.world)
    group.use_device(device)
    seed_randomness(training.seed)
    source = source or open_planned_source(
        data,
        device,
        plan,
        global_batch_size=training.global_batch_size,
        seed=training.seed,
        shuffle=training.shuffle,
        share=Share(rank=group.world.rank, size=group.world.size),
    )
    refuse_too_short(source.num_samples, training.global_batch_size)
    refuse_disagreement(group, model, optimizer, source, training)
    total_steps = training.total_steps(source.num_samples)
    schedule = training.make_schedule(total_steps)
    own = optimizer if isinstance(optimizer, Optimizer) else None
    device.put_model(model, own)
    layout = layout or Layout(model)
    device.refuse_layout(str(plan.value("layout")))
    if "attention" in plan.settings:
        device.refuse_attention(str(plan.value("attention")))
    if "norms" in plan.settings:
        device.refuse_norms(str(plan.value("norms")))
    layout.use(str(plan.value("layout")), own)
    joining = _join(model, group, plan, device)
    graphs, why_no_graphs = _open_graphs(plan, device, group)
    if isinstance(optimizer, OptimizerChoice):
        choice = optimizer
        optimizer = make_optimizer(
            choice,
            model,
            device,
            kernels=str(plan.value("optimizer_kernels")),
            is_captured=graphs is not None,
        )
        base_rates = choice.base_rates(optimizer)
    else:
        refuse_foreign_parameters(model, optimizer)
        base_rates = [float(group["lr"]) for group in optimizer.param_groups]
    if plan.value("loss_scaling") == "dynamic":
        device.refuse_scaling(optimizer)
    stepper = _make_stepper(model, optimizer, device, graphs, plan, training, joining)
    stepper.refusal = why_no_graphs
    return Parts(
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


def _join(model: nn.Module, group: Group, plan: Plan, device: AbstractDevice) -> Joining:
    """How several processes make one step; the first weights are those of the first process."""
    if group.is_alone:
        return Joining()
    group.same(model)
    if plan.value("sharding") == "full":
        # Loaded where it is needed: it brings half of torch along.
        from whet.world.sharded import Sharded

        return Sharded(model, group, blocks=find_blocks(model), kind=device.kind)
    bucket = plan.value("bucket_mb")
    return Replicated(model, group, bucket_mb=float(bucket) if isinstance(bucket, int) else 25.0)


def _open_graphs(plan: Plan, device: AbstractDevice, group: Group) -> tuple[AbstractGraphs | None, str | None]:
    """What captures steps, if that is planned; or why nothing does."""
    if plan.value("graph") == "off":
        return None, None
    if not group.is_alone:
        return None, "processes wait for each other in a step, which no graph can do"
    if plan.value("activation_checkpointing") == "on":
        return None, "computing activations again puts generators back, which no graph can do"
    graphs = device.graphs()
    return graphs, None if graphs is not None else f"{device.kind} cannot capture a step"


def _make_stepper(
    model: nn.Module,
    optimizer: Optimizer,
    device: AbstractDevice,
    graphs: AbstractGraphs | None,
    plan: Plan,
    training: Training,
    joining: Joining,
) -> Stepper:
    how: dict[str, Any] = {
        "precision": str(plan.value("precision")),
        "loss_scaling": str(plan.value("loss_scaling")),
        "clip": training.clip,
        "ema": Ema(model) if training.ema else None,
    }
    if graphs is not None:
        is_compiled = plan.value("compile") != "off"
        return GraphedStepper(model, optimizer, device, graphs=graphs, is_compiled=is_compiled, **how)
    return Stepper(model, optimizer, device, joining=joining, **how)


def open_planned_source(
    data: Any,
    device: AbstractDevice,
    plan: Plan,
    *,
    global_batch_size: int,
    seed: int = 0,
    shuffle: bool = False,
    share: Share | None = None,
) -> AbstractSource:
    """Data as the plan says: on the device or not, read by workers or here."""
    return open_source(
        data,
        device,
        global_batch_size=global_batch_size,
        seed=seed,
        shuffle=shuffle,
        is_resident=plan.value("data_home") == "device",
        loading=Loading(
            workers=int(plan.value("workers") or 0),
            start=str(plan.value("worker_start")),
            prefetch=int(plan.value("prefetch") or 2),
        ),
        share=share,
    )


def use_device(plan: Plan, world: World | None = None) -> tuple[Plan, AbstractDevice, str | None]:
    """Opens the planned device and sets what holds for the whole process. Of several processes each has its own GPU.

    Where it cannot be opened and on_device_failure=cpu, the plan is made anew for the CPU, and the reason is given.
    """
    opened = open_device(
        own_card(str(plan.value("device")), 0 if world is None or world.is_alone else world.local_rank),
        on_failure=str(plan.value("on_device_failure")),
        overlaps_copies=plan.value("copies") == "overlapped",
    )
    reason = opened.fell_back
    if reason is not None:
        plan = override(plan, {"device": "cpu"})
    elif str(plan.wishes.get("device", opened.device.kind)).partition(":")[0] != opened.device.kind:
        reason = plan.settings["device"].reason
    if plan.value("mps_fallback") == "on" and opened.device.kind == "mps" and not has_fallback():
        raise UsageError(
            "mps_fallback must be set before torch starts",
            got=f"mps_fallback=on, and no {FALLBACK} in the environment",
            try_=f"{FALLBACK}=1 python ..., or whet train, which sets it",
        )
    threads = plan.value("threads")
    if isinstance(threads, int):
        use_threads(threads)
    opened.device.use_precision(str(plan.value("precision")))
    return plan, opened.device, reason
