"""What is asked for: a training and the run that it belongs to, checked before anything is done."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from whet.data.columns import as_columns
from whet.device import mps
from whet.device.machine_here import machine_here
from whet.engine.refusals import refuse_disallowed, refuse_wishes_beside_plan
from whet.engine.training import Training
from whet.engine.workload import describe
from whet.plan.plan import Plan, make_plan
from whet.plan.setting import Scalar
from whet.plan.workload import Workload
from whet.step.optimizer import OptimizerChoice
from whet.verify.subject import Outputs
from whet.world.world import read_world, refuse_mps


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A model, its data, how it is trained, and in which run."""

    model: nn.Module
    optimizer: Optimizer | OptimizerChoice
    data: Any
    training: Training
    workload: Workload
    wishes: Mapping[str, Scalar]
    plan: Plan | None = None
    """For a new run, if it was made before."""
    path: Path | None = None
    """The run folder."""
    recipe: str = "session"
    command: list[str] = field(default_factory=list)
    config: Mapping[str, Any] = field(default_factory=dict)
    allow: tuple[str, ...] = ()
    init_from: str | Path | None = None
    attach: Mapping[str, bytes] = field(default_factory=dict)
    """Files that a new run folder holds from the start."""
    outputs: Outputs | None = None
    """Given for a causal model."""


def make_request(
    model: nn.Module,
    optimizer: Optimizer | OptimizerChoice,
    data: Any,
    training: Training,
    *,
    run: str | Path | None = None,
    device: str = "auto",
    wishes: Mapping[str, Scalar] | None = None,
    plan: Plan | None = None,
    workload: Workload | None = None,
    recipe: str = "session",
    config: Mapping[str, Any] | None = None,
    allow: Collection[str] = (),
    **rest: Any,
) -> Request:
    """A request with what was left out filled in; `rest` are fields of it as they are."""
    refuse_wishes_beside_plan(plan, wishes, device)
    world = read_world()
    # Before the processes have met: none of them would get further.
    refuse_mps(world.size, device=str((wishes or {}).get("device", device)), is_mac=mps.why_not() is None)
    chosen = {**(plan.wishes if plan else wishes or {}), **({} if device == "auto" else {"device": device})}
    if isinstance(optimizer, Optimizer):
        chosen["optimizer_kernels"] = "your optimizer"
    return Request(
        model=model,
        optimizer=optimizer,
        data=data,
        training=training,
        workload=(workload or describe(model, data, training, recipe=recipe)).model_copy(
            update={"world_size": world.size, "local_size": world.local_size}
        ),
        wishes=chosen,
        plan=plan,
        path=None if run is None else Path(run),
        recipe=recipe,
        config=training.as_json() if config is None else config,
        allow=refuse_disallowed(allow),
        **rest,
    )


def plan_by_rules(asked: Request) -> Plan:
    """The plan for it on this machine, before anything is measured."""
    machine, conditions = machine_here()
    return make_plan(machine, asked.workload, wishes=asked.wishes, conditions=conditions)


def can_be_read_again(data: Any) -> bool:
    """A stream is used up by whoever reads it first."""
    return as_columns(data) is not None or callable(getattr(data, "__getitem__", None))
