"""What a session does not do, said before it could do harm."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from whet.base.errors import UsageError
from whet.data.batch import GlobalBatch, Position
from whet.engine.starting import ALLOWED_KEYS
from whet.plan.plan import Plan
from whet.plan.setting import Scalar
from whet.step.optimizer import OptimizerChoice
from whet.world.world import World, refuse_mps


def refuse_wrong_kinds(model: Any, optimizer: Any, goal_is: str) -> None:
    """What is given must be what it is taken for."""
    if not isinstance(model, nn.Module):
        raise UsageError("the model must be an nn.Module", got=type(model).__name__, try_="class Model(nn.Module)")
    if any(isinstance(parameter, nn.UninitializedParameter) for parameter in model.parameters()):
        raise UsageError(
            "the model has lazy layers that have seen no data",
            got="an UninitializedParameter",
            try_="model(one batch) first",
        )
    if not isinstance(optimizer, Optimizer | OptimizerChoice):
        hint = 'torch.optim.AdamW(model.parameters(), lr=1e-3), or whet.OptimizerChoice(name="adamw", lr=1e-3)'
        raise UsageError("the optimizer must be one of torch's or a choice", got=repr(optimizer)[:80], try_=hint)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("LBFGS runs a step several times", got="LBFGS", try_="an optimizer that steps once")
    if goal_is not in ("max", "min"):
        raise UsageError("a goal is to be maximised or minimised", got=goal_is, try_='goal_is="max" or goal_is="min"')


def refuse_foreign_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """An optimizer over other parameters would leave the model as it is, without a word."""
    own = {id(parameter) for parameter in model.parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if foreign:
        raise UsageError(
            "the optimizer updates parameters that are not the model's",
            got=f"{len(foreign)} of them, the first of shape {tuple(foreign[0].shape)}",
            try_="an optimizer over model.parameters(), made after the model is complete",
        )


def refuse_foreign_schedule(optimizer: Optimizer, rates_set: list[float]) -> None:
    """Two schedules on one optimizer would undo each other, without a word."""
    rates = [group["lr"] for group in optimizer.param_groups]
    # A rate in a tensor is ours, and reading it would wait for the device.
    if rates_set and not isinstance(rates[0], torch.Tensor) and rates != rates_set:
        raise UsageError(
            "something else changes the learning rate",
            got=f"{rates}; whet had set {rates_set}",
            try_="schedule=... (a name, or a function from a step to a factor), and no scheduler beside it",
        )


def refuse_other_groups(optimizer: Optimizer, rates: list[float]) -> None:
    """Parameters that came later would have no base rate, and would not be clipped with the others."""
    if len(optimizer.param_groups) != len(rates):
        raise UsageError(
            "the optimizer has other groups of parameters than when the session began",
            got=f"{len(optimizer.param_groups)} groups; {len(rates)} at the beginning",
            try_="all parameters in it from the beginning, with requires_grad_(False) until their time comes",
        )


def refuse_other_batch(batch: GlobalBatch, *, current: GlobalBatch | None, position: Position) -> None:
    """A batch is stepped once, when it comes: another order would not be the one that a resume repeats."""
    if batch is not current or position == batch.after:
        raise UsageError(
            "every batch is stepped once, when it comes",
            got="a batch that was stepped before, or another one",
            try_="for batch in session: session.step(loss, batch)",
        )


def refuse_skipped_batch(num_steps: int) -> None:
    """A batch that is not stepped would be lost."""
    if num_steps != 1:
        raise UsageError(
            "every batch is one step",
            got=f"{num_steps} calls of step() for one batch",
            try_="for batch in session: session.step(loss, batch)",
        )


def refuse_shorter_data(position: Position) -> None:
    """An epoch that ends before its last sample."""
    if position.samples > 0:
        raise UsageError(
            "the data has become shorter",
            got=f"nothing behind sample {position.samples:,} of the epoch",
            try_="the data the run was started with",
        )


def refuse_outside(state: str) -> None:
    """A session has a device, data and a lock only inside `with`."""
    if state != "entered":
        raise UsageError(
            "a session works inside `with`", got=f"a session that is {state}", try_="with whet.Session(...) as session:"
        )


def refuse_reserved(names: set[str]) -> None:
    """Names that every event has."""
    taken = names & {"kind", "time", "step", "weights"}
    if taken:
        raise UsageError("a metric needs a name of its own", got=", ".join(taken), try_="another name")


def refuse_disallowed(allow: object) -> tuple[str, ...]:
    """The words of `allow`; only what is known may be allowed."""
    words = (allow,) if isinstance(allow, str) else tuple(allow) if isinstance(allow, Collection) else (allow,)
    for word in words:
        if word not in ALLOWED_KEYS:
            raise UsageError("this cannot be allowed", got=repr(word), try_=" or ".join(ALLOWED_KEYS))
    return words


def refuse_wishes_beside_plan(plan: Plan | None, wishes: Mapping[str, Scalar] | None, device: str) -> None:
    """A plan holds its wishes already."""
    if plan is not None and (wishes or device not in ("auto", plan.wishes.get("device"))):
        raise UsageError(
            "a plan has its wishes already", got="plan and wishes or device", try_="wishes=... when the plan is made"
        )


def refuse_in_several(model: nn.Module, optimizer: Any, plan: Plan, world: World) -> None:
    """What several processes cannot train together, or not as it was meant."""
    if world.is_alone:
        return
    refuse_mps(world.size, device=str(plan.value("device")), is_mac=False)
    number = f"{world.size} processes"
    if plan.workload.has_batchnorm:
        raise UsageError(
            "BatchNorm takes its statistics over what goes through one process at once",
            got=f"{number}; another number of them would be another training",
            try_="one process; or a model with GroupNorm or LayerNorm",
        )
    if any(getattr(module, "is_memory", False) for module in model.modules()):
        raise UsageError(
            "the model remembers each place of the batch from step to step", got=number, try_="one process"
        )
    if plan.value("sharding") != "full":
        return
    if isinstance(optimizer, Optimizer):
        raise UsageError(
            "a model in parts gets other parameters, which your optimizer does not know",
            got=f"{type(optimizer).__name__}, sharding=full",
            try_="optimizer=OptimizerChoice(...), which whet makes afterwards; or sharding=off",
        )
    if isinstance(optimizer, OptimizerChoice) and optimizer.name == "adafactor":
        raise UsageError(
            "adafactor needs whole weights", got=f"optimizer=adafactor, sharding=full, {number}", try_="optimizer=adamw"
        )
    if plan.value("loss_scaling") == "dynamic":
        raise UsageError(
            "loss scaling looks at whole gradients", got="precision=fp16, sharding=full", try_="precision=bf16"
        )
