"""Do all processes train the same? Asked once, before they share weights: each machine has its own words and files."""

import hashlib
from dataclasses import asdict
from typing import Any

from torch import nn
from torch.optim import Optimizer

from whet.base.errors import UsageError
from whet.data.source import AbstractSource
from whet.engine.training import Training
from whet.step.optimizer import OptimizerChoice
from whet.world.group import Group


def refuse_disagreement(
    group: Group,
    model: nn.Module,
    optimizer: Optimizer | OptimizerChoice,
    source: AbstractSource,
    training: Training,
) -> None:
    """Refuses, in all processes, what one of them would train differently: nobody would see it in the loss."""
    if group.is_alone:
        return
    told = group.gather(
        {
            **training.as_json(),
            **_facts_of(optimizer),
            "model": _shapes_of(model),
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


def _facts_of(optimizer: Optimizer | OptimizerChoice) -> dict[str, Any]:
    if isinstance(optimizer, OptimizerChoice):
        return {"optimizer" if name == "name" else name: value for name, value in asdict(optimizer).items()}
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return {"optimizer": type(optimizer).__name__, "lr": rates}


def _shapes_of(model: nn.Module) -> str:
    """How many parameters, and a short digest of their names, shapes and dtypes."""
    known = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    count = sum(p.numel() for p in model.parameters())
    return f"{count:,} parameters ({hashlib.sha256(repr(known).encode()).hexdigest()[:8]})"
