"""Checks of the user's input, made before anything is changed."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from whet.base.errors import UsageError
from whet.data.adapters import AbstractSource
from whet.data.batch import GlobalBatch, Position
from whet.distributed.group import RankGroup
from whet.distributed.ranks import RankInfo, check_not_mps
from whet.plan.kernel_support import GROUP_NORM_ACTIVATION, SPAN_ATTENTION, attention_kernel_reason, norm_kernel_reason
from whet.plan.plan import Plan
from whet.plan.setting import Scalar
from whet.step.optimizers import OptimizerChoice
from whet.training.resume import ALLOWED_KEYS
from whet.training.training_config import TrainingConfig


def check_ranks_agree(
    group: RankGroup,
    model: nn.Module,
    optimizer: Optimizer | OptimizerChoice,
    source: AbstractSource,
    training: TrainingConfig,
) -> None:
    """Refuses, in all processes, what one of them would train differently: nobody would see it in the loss."""
    if group.is_alone:
        return
    told = group.gather(
        {
            **training.as_json(),
            **_optimizer_facts(optimizer),
            "model": _model_digest(model),
            "samples": source.num_samples,
            "content of the data": source.fingerprint(),
        }
    )
    for rank, theirs in enumerate(told):
        for name in told[0] | theirs:
            mine, other = told[0].get(name), theirs.get(name)
            # Data that gives another sample each time has no fingerprint.
            is_unknown = name == "content of the data" and None in (mine, other)
            if mine != other and not is_unknown:
                raise UsageError(
                    "the processes do not train the same",
                    got=f"{name}: {mine} in rank 0, {other} in rank {rank}",
                    try_="the same words, the same files and the same code on every machine",
                )


def _optimizer_facts(optimizer: Optimizer | OptimizerChoice) -> dict[str, Any]:
    if isinstance(optimizer, OptimizerChoice):
        return {"optimizer" if name == "name" else name: value for name, value in asdict(optimizer).items()}
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return {"optimizer": type(optimizer).__name__, "lr": rates}


def _model_digest(model: nn.Module) -> str:
    """How many parameters, and a short digest of their names, shapes and dtypes."""
    known = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    count = sum(p.numel() for p in model.parameters())
    return f"{count:,} parameters ({hashlib.sha256(repr(known).encode()).hexdigest()[:8]})"


_HALF_PRECISIONS = ("bf16", "fp16")


def check_own_attention(plan: Plan) -> None:
    """Refuses attention=own for a model without such attention, or for batches or numbers that it is not for."""
    workload, lengths, precision = plan.workload, plan.lengths, plan.precision
    if attention_kernel_reason(workload.layers, lengths_vary=workload.lengths_vary, lengths=lengths) is not None:
        if precision not in _HALF_PRECISIONS:
            raise UsageError(
                "whet's own attention is for half precision",
                got=f"attention=own precision={precision}",
                try_="precision=bf16, or attention=torch",
            )
        return
    if SPAN_ATTENTION in workload.layers:
        raise UsageError(
            "whet's own attention is for texts that lie one behind the other",
            got=f"attention=own lengths={lengths}",
            try_="lengths=packed, or attention=torch",
        )
    raise UsageError(
        "the model has no attention that whet's own kernels are for", got="attention=own", try_="attention=torch"
    )


def check_own_norms(plan: Plan) -> None:
    """Refuses norms=own for a model without such norms, or where they lie otherwise."""
    layers, layout, precision = plan.workload.layers, plan.layout, plan.precision
    if norm_kernel_reason(layers, layout=layout) is None:
        if GROUP_NORM_ACTIVATION not in layers:
            raise UsageError(
                "the model has no norms that whet's own kernels are for", got="norms=own", try_="norms=torch"
            )
        raise UsageError(
            "whet's own group norms are for channels_last",
            got=f"norms=own layout={layout}",
            try_="layout=channels_last, or norms=torch",
        )
    if precision not in _HALF_PRECISIONS:
        raise UsageError(
            "whet's own norms are for half precision",
            got=f"norms=own precision={precision}",
            try_="precision=bf16, or norms=torch",
        )


def check_types(model: Any, optimizer: Any, mode: str) -> None:
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
    if mode not in ("max", "min"):
        raise UsageError("a goal is to be maximised or minimised", got=mode, try_='goal_is="max" or goal_is="min"')


def check_parameters_owned(model: nn.Module, optimizer: Optimizer) -> None:
    """An optimizer over other parameters would leave the model as it is, without a word."""
    own = {id(parameter) for parameter in model.parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if foreign:
        raise UsageError(
            "the optimizer updates parameters that are not the model's",
            got=f"{len(foreign)} of them, the first of shape {tuple(foreign[0].shape)}",
            try_="an optimizer over model.parameters(), made after the model is complete",
        )


def check_no_other_scheduler(optimizer: Optimizer, rates_set: list[float]) -> None:
    """Two schedules on one optimizer would undo each other, without a word."""
    rates = [group["lr"] for group in optimizer.param_groups]
    # A rate in a tensor is ours, and reading it would wait for the device.
    if rates_set and not isinstance(rates[0], torch.Tensor) and rates != rates_set:
        raise UsageError(
            "something else changes the learning rate",
            got=f"{rates}; whet had set {rates_set}",
            try_="schedule=... (a name, or a function from a step to a factor), and no scheduler beside it",
        )


def check_parameter_groups(optimizer: Optimizer, rates: list[float]) -> None:
    """Parameters that came later would have no base rate, and would not be clipped with the others."""
    if len(optimizer.param_groups) != len(rates):
        raise UsageError(
            "the optimizer has other groups of parameters than when the session began",
            got=f"{len(optimizer.param_groups)} groups; {len(rates)} at the beginning",
            try_="all parameters in it from the beginning, with requires_grad_(False) until their time comes",
        )


def check_current_batch(batch: GlobalBatch, *, current: GlobalBatch | None, position: Position) -> None:
    """A batch is stepped once, when it comes: another order would not be the one that a resume repeats."""
    if batch is not current or position == batch.after:
        raise UsageError(
            "every batch is stepped once, when it comes",
            got="a batch that was stepped before, or another one",
            try_="for batch in session: session.step(loss, batch)",
        )


def check_one_step(num_steps: int) -> None:
    """A batch that is not stepped would be lost."""
    if num_steps != 1:
        raise UsageError(
            "every batch is one step",
            got=f"{num_steps} calls of step() for one batch",
            try_="for batch in session: session.step(loss, batch)",
        )


def check_epoch_complete(position: Position) -> None:
    """An epoch that ends before its last sample."""
    if position.samples > 0:
        raise UsageError(
            "the data has become shorter",
            got=f"nothing behind sample {position.samples:,} of the epoch",
            try_="the data the run was started with",
        )


def check_entered(state: str) -> None:
    """A session has a device, data and a lock only inside `with`."""
    if state != "entered":
        raise UsageError(
            "a session works inside `with`", got=f"a session that is {state}", try_="with whet.Session(...) as session:"
        )


def check_metric_names(names: set[str]) -> None:
    """Names that every event has."""
    taken = names & {"kind", "time", "step", "weights"}
    if taken:
        raise UsageError("a metric needs a name of its own", got=", ".join(taken), try_="another name")


def parse_allow(allow: object) -> tuple[str, ...]:
    """The words of `allow`; only what is known may be allowed."""
    words = (allow,) if isinstance(allow, str) else tuple(allow) if isinstance(allow, Collection) else (allow,)
    for word in words:
        if word not in ALLOWED_KEYS:
            raise UsageError("this cannot be allowed", got=repr(word), try_=" or ".join(ALLOWED_KEYS))
    return words


def check_overrides_with_plan(plan: Plan | None, overrides: Mapping[str, Scalar] | None, device: str) -> None:
    """A plan holds its wishes already."""
    if plan is not None and (overrides or device not in ("auto", plan.overrides.get("device"))):
        raise UsageError(
            "a plan has its wishes already", got="plan and wishes or device", try_="wishes=... when the plan is made"
        )


def check_multi_rank(model: nn.Module, optimizer: Any, plan: Plan, world: RankInfo) -> None:
    """What several processes cannot train together, or not as it was meant."""
    if world.is_alone:
        return
    check_not_mps(world.size, device=plan.device, is_mac=False)
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
    if plan.sharding != "full":
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
    if plan.loss_scaling == "dynamic":
        raise UsageError(
            "loss scaling looks at whole gradients", got="precision=fp16, sharding=full", try_="precision=bf16"
        )
