"""Validation of user input, before anything is changed."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from whet.base.errors import UsageError
from whet.data.batch import Position
from whet.data.source import AbstractSource
from whet.distributed.group import RankGroup
from whet.distributed.ranks import RankInfo, check_not_mps
from whet.plan.kernel_support import GROUP_NORM_ACTIVATION, SPAN_ATTENTION, attention_kernel_reason, norm_kernel_reason
from whet.plan.plan import Plan
from whet.plan.setting import Scalar
from whet.plan.values import HALF_PRECISIONS
from whet.plan.workload import OPTIMIZER_KERNELS
from whet.step.ema import named_tensors
from whet.step.optimizers import OptimizerChoice
from whet.training.optimizer_set import OptimizerSet
from whet.training.resume import ALLOWED_KEYS
from whet.training.torch_schedule import encode_scheduler
from whet.training.training_config import TrainingConfig

_RESERVED_METRICS = {"kind", "time", "step", "weights"}
"""Names of fields of an evaluation event, which no metric may have."""
_ONE_STEP_HINT = "for batch in session: session.step(loss, batch)"


# --- user arguments ---------------------------------------------------------------------------------------------------


def check_model_and_optimizer(model: Any, optimizers: OptimizerSet) -> None:
    """Raise UsageError if an object has the wrong type or the optimizer has parameters of a different model."""
    optimizer: Any = optimizers.main
    if not isinstance(model, nn.Module):
        raise UsageError("the model must be an nn.Module", got=type(model).__name__, try_="class Model(nn.Module)")
    if any(isinstance(parameter, nn.UninitializedParameter) for parameter in model.parameters()):
        raise UsageError(
            "the model has lazy layers that have seen no data",
            got="an UninitializedParameter",
            try_="model(one batch) first",
        )
    empty = [name for name, tensor in named_tensors(model) if tensor.is_meta]
    if empty:
        raise UsageError(
            "the model has tensors without values",
            got=f"{empty[0]} is on the meta device" + (f", and {len(empty) - 1} more" if len(empty) > 1 else ""),
            try_='model.to_empty(device="cpu"), then your initialization',
        )
    if not isinstance(optimizer, Optimizer | OptimizerChoice):
        hint = 'torch.optim.AdamW(model.parameters(), lr=1e-3), or whet.OptimizerChoice(name="adamw", lr=1e-3)'
        raise UsageError(
            "the optimizer must be a torch.optim.Optimizer or an OptimizerChoice", got=repr(optimizer)[:80], try_=hint
        )
    for one in optimizers.torch_optimizers.values():
        _check_parameters_owned(model, one)


def _check_parameters_owned(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise UsageError if the optimizer holds parameters of a different model: training would have no effect."""
    own = {id(parameter) for parameter in model.parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if foreign:
        raise UsageError(
            "the optimizer updates parameters that are not the model's",
            got=f"{len(foreign)} of them, the first of shape {tuple(foreign[0].shape)}",
            try_="an optimizer over model.parameters(), made after the model is complete",
        )


def check_kernels(kernels: Any, optimizer: Mapping[str, str | None]) -> None:
    """Raise UsageError if the optimizer, as a workload describes it, does not support the requested kernels."""
    if kernels == "yours" and "optimizer" not in optimizer:
        raise UsageError(
            "the kernels of an optimizer that whet builds are not yours",
            got="optimizer_kernels=yours",
            try_="optimizer_kernels=fused, foreach or loop; or an optimizer object",
        )
    obstacle = optimizer.get("optimizer_obstacle")
    if kernels not in (None, "yours") and obstacle is not None:
        raise UsageError(
            f"your optimizer keeps its own kernels: {obstacle}",
            got=f"optimizer_kernels={kernels}",
            try_="no optimizer_kernels, or optimizer_kernels=yours",
        )
    built = optimizer.get("built_optimizer")
    if kernels == "fused" and built is not None and "fused" not in OPTIMIZER_KERNELS.get(built, "fused"):
        raise UsageError(
            f"{built} has no fused kernels", got="optimizer_kernels=fused", try_="optimizer_kernels=foreach or loop"
        )


def check_several_optimizers(optimizers: OptimizerSet, training: TrainingConfig, *, num_ranks: int) -> None:
    """Raise UsageError for options that cannot be combined with several optimizers."""
    if not optimizers.others:
        return
    number = f"{len(optimizers.names)} optimizers"
    if training.ema:
        raise UsageError(
            "ema=True supports only one optimizer",
            got=f"ema=True with {number}",
            try_="ema=False; a callback can keep its own average",
        )
    if num_ranks > 1:
        raise UsageError(
            "several optimizers require a single process", got=f"{number}, {num_ranks} processes", try_="--nproc 1"
        )


def check_overrides_with_plan(plan: Plan | None, overrides: Mapping[str, Scalar] | None, device: str) -> None:
    """Raise UsageError if a plan, which already contains its overrides, comes with overrides or a device."""
    if plan is not None and (overrides or device not in ("auto", plan.overrides.get("device"))):
        raise UsageError(
            "a plan already contains its overrides",
            got="plan together with overrides or device",
            try_="overrides=... when the plan is made",
        )


def check_goal_is_evaluated(
    options: Mapping[str, Any], *, goal: str | None, is_evaluated: bool = True, hint: str = 'goal="val_loss"'
) -> None:
    """Raise UsageError if an option depends on the goal but the goal is never evaluated."""
    watching = [f"patience={options['patience']}"] if options.get("patience") is not None else []
    schedule = options.get("schedule")
    schedules = schedule.values() if isinstance(schedule, Mapping) else (schedule,)
    watching += ['schedule="plateau"'] if any(one == "plateau" for one in schedules if isinstance(one, str)) else []
    if watching and (goal is None or not is_evaluated):
        missing = "a goal" if is_evaluated else "val"
        raise UsageError(
            f"{watching[0]} needs a goal metric, but none is evaluated",
            got=f"{watching[0]} without {missing}",
            try_=hint,
        )


def parse_allow(allow: object) -> tuple[str, ...]:
    """Return the names in `allow` as a tuple. Raise UsageError for unknown names."""
    names = (allow,) if isinstance(allow, str) else tuple(allow) if isinstance(allow, Collection) else (allow,)
    for name in names:
        if name not in ALLOWED_KEYS:
            raise UsageError("unknown value for --allow", got=repr(name), try_=" or ".join(ALLOWED_KEYS))
    return names


# --- use of a session ------------------------------------------------------------------------------------------------


def optimizer_name(optimizers: OptimizerSet, name: str | None, every: int) -> str:
    """Return the name of the optimizer to step. Raise UsageError if the choice is ambiguous."""
    if type(every) is not int or every < 1:
        raise UsageError("every must be a positive whole number", got=f"every={every!r}", try_="every=5")
    if name is None and not optimizers.others:
        return optimizers.main_name
    if name not in optimizers.names:
        got = "no optimizer=" if name is None else f"optimizer={name!r}"
        known = " or ".join(f'optimizer="{known}"' for known in optimizers.names if known) or "no optimizer="
        raise UsageError(
            "session.step needs the name of an optimizer", got=got, try_=f"session.step(loss, batch, {known})"
        )
    return name


def check_no_closure(optimizer: Optimizer) -> None:
    """Raise UsageError for an optimizer that evaluates the loss several times per step."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS evaluates the loss several times in a step",
            got="session.step with LBFGS",
            try_="with session.manual(batch) as data: optimizer.step(closure)",
        )


def check_one_optimizer(optimizer: Any) -> None:
    """Raise UsageError for training that requires a custom loop: several optimizers, or an optimizer with a closure."""
    if isinstance(optimizer, Mapping):
        raise UsageError(
            "whet.train makes one step for each batch",
            got=f"optimizers {', '.join(map(str, optimizer))}",
            try_='with whet.Session(...) as session: session.step(loss, batch, optimizer="..."), for each of them',
        )
    check_no_closure(optimizer)


def manual_loss(_: Any) -> NoReturn:
    """Raise UsageError. A placeholder for the loss of manual steps, which only the user's loop can compute."""
    raise UsageError(
        "this command needs a loss function, but the run uses manual steps",
        got="session.manual",
        try_="whet prove, which repeats the whole run; or session.step(loss, batch)",
    )


def check_manual(training: TrainingConfig, group: RankGroup) -> None:
    """Raise UsageError for options that have no effect on manual steps."""
    if not group.is_single_process:
        raise UsageError("manual steps require a single process", got=f"{group.ranks.size} processes", try_="--nproc 1")
    if training.ema:
        raise UsageError("ema=True needs session.step", got="a manual step", try_="ema=False")
    if training.clip is not None:
        raise UsageError(
            "clip has no effect on manual steps",
            got=f"clip={training.clip}",
            try_="no clip, and torch.nn.utils.clip_grad_norm_(model.parameters(), ...) before optimizer.step()",
        )


def eval_mode_error(step: int) -> UsageError:
    """Return the error for an evaluation that left the model in eval mode; a plain loop calls train() in each epoch."""
    return UsageError(
        "the model is in eval mode: it would train without dropout, and BatchNorm would not update its statistics",
        got=f"model.eval() before step {step:,}",
        try_="model.train() after your evaluation, or session.evaluate(...), which restores the mode",
    )


def wrong_batch_error() -> UsageError:
    """Return the error for a batch passed out of order: a resume can repeat only the planned order."""
    got = "a batch that was stepped before, or another one"
    return UsageError("pass each batch to step() once, in order", got=got, try_=_ONE_STEP_HINT)


def one_step_error(num_steps: int) -> UsageError:
    """Return the error for a batch not stepped exactly once: its samples would be lost or repeated."""
    return UsageError(
        "call step() once for each batch", got=f"{num_steps} calls of step() for one batch", try_=_ONE_STEP_HINT
    )


def check_epoch_complete(position: Position) -> None:
    """Raise UsageError if an epoch ends before its last sample."""
    if position.samples > 0:
        raise UsageError(
            "the data is shorter than when the run was started",
            got=f"nothing after sample {position.samples:,} of the epoch",
            try_="the data the run was started with",
        )


def check_metric_names(names: set[str]) -> None:
    """Raise UsageError if a metric has the name of a reserved event field."""
    taken = names & _RESERVED_METRICS
    if taken:
        raise UsageError("a metric has a reserved name", got=", ".join(taken), try_="another name")


# --- whet's kernels ---------------------------------------------------------------------------------------------------


def check_whet_attention(plan: Plan) -> None:
    """Raise UsageError if attention=whet is requested but whet's attention kernels would not be used."""
    workload, lengths, precision = plan.workload, plan.lengths, plan.precision
    if attention_kernel_reason(workload.layers, lengths_vary=workload.lengths_vary, lengths=lengths) is not None:
        if precision not in HALF_PRECISIONS:
            raise UsageError(
                "whet's attention kernels need half precision",
                got=f"attention=whet precision={precision}",
                try_="precision=bf16, or attention=torch",
            )
        return
    if SPAN_ATTENTION in workload.layers:
        raise UsageError(
            "whet's attention kernels need packed sequences",
            got=f"attention=whet lengths={lengths}",
            try_="lengths=packed, or attention=torch",
        )
    raise UsageError(
        "the model has no attention that whet's kernels support", got="attention=whet", try_="attention=torch"
    )


def check_whet_norms(plan: Plan) -> None:
    """Raise UsageError if norms=whet is requested but whet's norm kernels would not be used."""
    layers, layout, precision = plan.workload.layers, plan.layout, plan.precision
    if norm_kernel_reason(layers, layout=layout) is None:
        if GROUP_NORM_ACTIVATION not in layers:
            raise UsageError("the model has no norms that whet's kernels support", got="norms=whet", try_="norms=torch")
        raise UsageError(
            "whet's group norm kernels need channels_last",
            got=f"norms=whet layout={layout}",
            try_="layout=channels_last, or norms=torch",
        )
    if precision not in HALF_PRECISIONS:
        raise UsageError(
            "whet's norm kernels need half precision",
            got=f"norms=whet precision={precision}",
            try_="precision=bf16, or norms=torch",
        )


# --- splitting --------------------------------------------------------------------------------------------------------


def check_micro_batch(plan: Plan, training: TrainingConfig) -> None:
    """Raise UsageError if the user's micro_batch would change BatchNorm statistics and split_batch=True is not set."""
    micro, share = plan.overrides.get("micro_batch"), plan.workload.samples_per_rank
    if not plan.workload.has_batchnorm or training.split_batch is True or not isinstance(micro, int) or micro >= share:
        return
    raise UsageError(
        f"micro_batch={micro} would change what is trained",
        got="BatchNorm, whose statistics would be those of a micro-batch",
        try_="no micro_batch; or split_batch=True if that is what you want",
    )


# --- training on several ranks ----------------------------------------------------------------------------------------


def check_multi_rank(model: nn.Module, optimizer: Any, plan: Plan, ranks: RankInfo) -> None:
    """Raise UsageError if several ranks cannot train this model together, or if the result would depend on their number."""
    if ranks.is_single_process:
        return
    check_not_mps(ranks.size, device=plan.device, is_mac=False)
    number = f"{ranks.size} processes"
    if plan.workload.has_batchnorm:
        raise UsageError(
            "BatchNorm takes its statistics over the samples of one process",
            got=f"{number}; a different number would change what is trained",
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
            "adafactor does not support sharded weights",
            got=f"optimizer=adafactor, sharding=full, {number}",
            try_="optimizer=adamw",
        )
    if plan.loss_scaling == "dynamic":
        raise UsageError(
            "loss scaling does not support sharded gradients",
            got="precision=fp16, sharding=full",
            try_="precision=bf16",
        )


def check_ranks_agree(
    group: RankGroup,
    model: nn.Module,
    optimizer: Optimizer | OptimizerChoice,
    source: AbstractSource,
    training: TrainingConfig,
) -> None:
    """Raise UsageError on all ranks if the model, data or options differ on one of them.

    The loss would not reveal such a difference.
    """
    if group.is_single_process:
        return
    schedule = training.schedule
    facts = group.all_gather(
        {
            **training.as_json(),
            **_optimizer_facts(optimizer),
            **({"scheduler": encode_scheduler(schedule)} if isinstance(schedule, LRScheduler) else {}),
            "model": _model_digest(model),
            "samples": source.num_samples,
            "content of the data": source.fingerprint(),
        }
    )
    for rank, theirs in enumerate(facts):
        for name in facts[0] | theirs:
            first, other = facts[0].get(name), theirs.get(name)
            # Data that returns different samples on each read has no fingerprint.
            is_unknown = name == "content of the data" and None in (first, other)
            if first != other and not is_unknown:
                raise UsageError(
                    "the ranks have different configurations",
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
