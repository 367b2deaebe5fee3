"""Validation of the user's input, before anything is changed."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from whet.base.errors import UsageError
from whet.data.adapters import AbstractSource
from whet.data.batch import Position
from whet.distributed.group import RankGroup
from whet.distributed.ranks import RankInfo, check_not_mps
from whet.plan.kernel_support import GROUP_NORM_ACTIVATION, SPAN_ATTENTION, attention_kernel_reason, norm_kernel_reason
from whet.plan.plan import Plan
from whet.plan.setting import Scalar
from whet.step.optimizers import OptimizerChoice
from whet.training.resume import ALLOWED_KEYS
from whet.training.training_config import TrainingConfig

_HALF_PRECISIONS = ("bf16", "fp16")
_RESERVED_METRICS = {"kind", "time", "step", "weights"}
"""Names that an evaluation event uses for its own fields."""
_ONE_STEP_HINT = "for batch in session: session.step(loss, batch)"


# --- what the user passes ---------------------------------------------------------------------------------------------


def check_model_and_optimizer(model: Any, optimizer: Any, mode: str) -> None:
    """Raise for objects of the wrong type, and for an optimizer over parameters of a different model."""
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
        raise UsageError("mode must be max or min", got=repr(mode), try_='mode="max" or mode="min"')
    if isinstance(optimizer, Optimizer):
        _check_parameters_owned(model, optimizer)


def _check_parameters_owned(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise if the optimizer holds parameters of a different model: it would silently train nothing."""
    own = {id(parameter) for parameter in model.parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if foreign:
        raise UsageError(
            "the optimizer updates parameters that are not the model's",
            got=f"{len(foreign)} of them, the first of shape {tuple(foreign[0].shape)}",
            try_="an optimizer over model.parameters(), made after the model is complete",
        )


def check_overrides_with_plan(plan: Plan | None, overrides: Mapping[str, Scalar] | None, device: str) -> None:
    """Raise if overrides or a device are passed together with a plan, which contains them already."""
    if plan is not None and (overrides or device not in ("auto", plan.overrides.get("device"))):
        raise UsageError(
            "a plan has its overrides already",
            got="plan together with overrides or device",
            try_="overrides=... when the plan is made",
        )


def parse_allow(allow: object) -> tuple[str, ...]:
    """Return the names in `allow`. Raise for unknown names."""
    names = (allow,) if isinstance(allow, str) else tuple(allow) if isinstance(allow, Collection) else (allow,)
    for name in names:
        if name not in ALLOWED_KEYS:
            raise UsageError("this cannot be allowed", got=repr(name), try_=" or ".join(ALLOWED_KEYS))
    return names


# --- how a session is used --------------------------------------------------------------------------------------------


def wrong_batch_error() -> UsageError:
    """Return the error for a batch that is out of order: a resume can only repeat the planned order."""
    got = "a batch that was stepped before, or another one"
    return UsageError("every batch is stepped once, in order", got=got, try_=_ONE_STEP_HINT)


def one_step_error(num_steps: int) -> UsageError:
    """Return the error for a batch that was not stepped exactly once: its samples would be lost or repeated."""
    return UsageError("every batch is one step", got=f"{num_steps} calls of step() for one batch", try_=_ONE_STEP_HINT)


def check_epoch_complete(position: Position) -> None:
    """Raise if an epoch ends before its last sample."""
    if position.samples > 0:
        raise UsageError(
            "the data has become shorter",
            got=f"nothing after sample {position.samples:,} of the epoch",
            try_="the data the run was started with",
        )


def check_metric_names(names: set[str]) -> None:
    """Raise for metrics with the name of a reserved event field."""
    taken = names & _RESERVED_METRICS
    if taken:
        raise UsageError("a metric has a reserved name", got=", ".join(taken), try_="another name")


# --- kernels of our own -----------------------------------------------------------------------------------------------


def check_own_attention(plan: Plan) -> None:
    """Raise for attention=own if whet's attention kernels would not be used."""
    workload, lengths, precision = plan.workload, plan.lengths, plan.precision
    if attention_kernel_reason(workload.layers, lengths_vary=workload.lengths_vary, lengths=lengths) is not None:
        if precision not in _HALF_PRECISIONS:
            raise UsageError(
                "whet's attention kernels need half precision",
                got=f"attention=own precision={precision}",
                try_="precision=bf16, or attention=torch",
            )
        return
    if SPAN_ATTENTION in workload.layers:
        raise UsageError(
            "whet's attention kernels need packed sequences",
            got=f"attention=own lengths={lengths}",
            try_="lengths=packed, or attention=torch",
        )
    raise UsageError(
        "the model has no attention that whet's kernels support", got="attention=own", try_="attention=torch"
    )


def check_own_norms(plan: Plan) -> None:
    """Raise for norms=own if whet's norm kernels would not be used."""
    layers, layout, precision = plan.workload.layers, plan.layout, plan.precision
    if norm_kernel_reason(layers, layout=layout) is None:
        if GROUP_NORM_ACTIVATION not in layers:
            raise UsageError("the model has no norms that whet's kernels support", got="norms=own", try_="norms=torch")
        raise UsageError(
            "whet's group norm kernels need channels_last",
            got=f"norms=own layout={layout}",
            try_="layout=channels_last, or norms=torch",
        )
    if precision not in _HALF_PRECISIONS:
        raise UsageError(
            "whet's norm kernels need half precision",
            got=f"norms=own precision={precision}",
            try_="precision=bf16, or norms=torch",
        )


# --- several ranks ----------------------------------------------------------------------------------------------------


def check_multi_rank(model: nn.Module, optimizer: Any, plan: Plan, ranks: RankInfo) -> None:
    """Raise for a training that several ranks do not support, or that would depend on their number."""
    if ranks.is_single_process:
        return
    check_not_mps(ranks.size, device=plan.device, is_mac=False)
    number = f"{ranks.size} processes"
    if plan.workload.has_batchnorm:
        raise UsageError(
            "BatchNorm takes its statistics over the samples of one process",
            got=f"{number}; another number of them would be another training",
            try_="one process; or a model with GroupNorm or LayerNorm",
        )
    if any(getattr(module, "is_memory", False) for module in model.modules()):
        raise UsageError(
            "the model keeps state for each row of the batch between steps", got=number, try_="one process"
        )
    if plan.sharding != "full":
        return
    if isinstance(optimizer, Optimizer):
        raise UsageError(
            "sharding replaces the parameters that your optimizer holds",
            got=f"{type(optimizer).__name__}, sharding=full",
            try_="optimizer=OptimizerChoice(...), which is built after sharding; or sharding=off",
        )
    if isinstance(optimizer, OptimizerChoice) and optimizer.name == "adafactor":
        raise UsageError(
            "adafactor needs whole weights", got=f"optimizer=adafactor, sharding=full, {number}", try_="optimizer=adamw"
        )
    if plan.loss_scaling == "dynamic":
        raise UsageError(
            "loss scaling needs whole gradients", got="precision=fp16, sharding=full", try_="precision=bf16"
        )


def check_ranks_agree(
    group: RankGroup,
    model: nn.Module,
    optimizer: Optimizer | OptimizerChoice,
    source: AbstractSource,
    training: TrainingConfig,
) -> None:
    """Raise on all ranks if the training differs on one of them: the loss would not show it."""
    if group.is_single_process:
        return
    facts = group.all_gather(
        {
            **training.as_json(),
            **_optimizer_facts(optimizer),
            "model": _model_digest(model),
            "samples": source.num_samples,
            "content of the data": source.fingerprint(),
        }
    )
    for rank, theirs in enumerate(facts):
        for name in facts[0] | theirs:
            first, other = facts[0].get(name), theirs.get(name)
            # Data that returns different samples each time has no fingerprint.
            is_unknown = name == "content of the data" and None in (first, other)
            if first != other and not is_unknown:
                raise UsageError(
                    "the ranks do not train the same",
                    got=f"{name}: {first} on rank 0, {other} on rank {rank}",
                    try_="the same arguments, the same files and the same code on every machine",
                )


def _optimizer_facts(optimizer: Optimizer | OptimizerChoice) -> dict[str, Any]:
    if isinstance(optimizer, OptimizerChoice):
        return {"optimizer" if name == "name" else name: value for name, value in asdict(optimizer).items()}
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return {"optimizer": type(optimizer).__name__, "lr": rates}


def _model_digest(model: nn.Module) -> str:
    """Return the number of parameters and a short digest of their names, shapes and dtypes."""
    known = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    count = sum(p.numel() for p in model.parameters())
    return f"{count:,} parameters ({hashlib.sha256(repr(known).encode()).hexdigest()[:8]})"
