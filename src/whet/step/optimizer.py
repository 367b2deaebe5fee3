"""The optimizer: AdamW with few kernels by default, another one by name, or any of yours as it is."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from whet.base.errors import UsageError
from whet.device.abstract import AbstractDevice
from whet.step.adam_atan2 import AdamATan2
from whet.world.rows import is_shared

NAMES = ("adamw", "adafactor", "sgd", "adam_atan2")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerChoice:
    """An optimizer that whet makes for you, with the kernels the plan says."""

    name: str = "adamw"
    lr: float = 3e-4
    weight_decay: float = 0.01
    table_lr: float | None = None
    """For tables of which a step sees few rows; as the others if not given."""
    table_weight_decay: float | None = None

    def base_rates(self, optimizer: Optimizer) -> list[float]:
        """The learning rate of each group of the optimizer that was made."""
        table_lr = self.lr if self.table_lr is None else self.table_lr
        return [table_lr if group.get("is_table") else self.lr for group in optimizer.param_groups]


def make_optimizer(
    choice: OptimizerChoice,
    model: nn.Module,
    device: AbstractDevice,
    *,
    kernels: str = "fused",
    is_captured: bool = False,
) -> Optimizer:
    """An optimizer over the model's trainable parameters; biases and norms are not decayed, but for adam_atan2.

    One that is captured keeps all its numbers on the device.
    """
    name, lr = choice.name, choice.lr
    groups = decay_groups(model.parameters(), weight_decay=choice.weight_decay)
    # Fused kernels know no complex numbers.
    is_real = not any(p.is_complex() for group in groups for p in group["params"])
    fused, foreach = kernels == "fused" and is_real, kernels == "foreach"
    if name == "sgd" and fused and any(is_shared(p) for group in groups for p in group["params"]):
        # torch's fused SGD knows no parameters in parts.
        fused, foreach = False, True
    # A rate that lies in a tensor can change without a new kernel or a new graph; fused kernels take it so.
    rate: Any = torch.tensor(lr, dtype=device.lr_dtype, device=device.place) if fused or is_captured else lr
    if name == "adamw":
        adamw = torch.optim.AdamW(groups, lr=rate, fused=fused, foreach=foreach, capturable=is_captured)
        # Steps before a capture are no mistake.
        adamw._warned_capturable_if_run_uncaptured = True
        return adamw
    if name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=0.9, fused=fused, foreach=foreach)
    if name == "adam_atan2":
        groups = atan2_groups(model, choice)
        foreach = kernels != "loop" and is_real
        return AdamATan2(groups, lr=rate if is_captured else lr, foreach=foreach, capturable=is_captured)
    if name == "adafactor":
        return torch.optim.Adafactor(groups, lr=lr, foreach=None if fused else foreach)
    raise UsageError("no such optimizer", got=name, try_=" or ".join(NAMES))


def decay_groups(parameters: Iterable[nn.Parameter], *, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with decay, vectors (biases, norms) without."""
    trainable = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def atan2_groups(model: nn.Module, choice: OptimizerChoice) -> list[dict[str, Any]]:
    """All parameters with decay; tables of modules that say `is_table = True` by themselves."""
    tables = [p for module in model.modules() if getattr(module, "is_table", False) for p in module.parameters(False)]
    others = [p for p in model.parameters() if p.requires_grad and all(p is not table for table in tables)]
    decay = choice.weight_decay if choice.table_weight_decay is None else choice.table_weight_decay
    groups = [
        {"params": others, "weight_decay": choice.weight_decay},
        {"params": [p for p in tables if p.requires_grad], "weight_decay": decay, "is_table": True},
    ]
    return [group for group in groups if group["params"]]


def set_rate(optimizer: Optimizer, factor: float, base_rates: list[float]) -> list[float]:
    """Sets every group's learning rate to `factor` times its base rate, in place where it is a tensor; the rates."""
    rates = [base * factor for base in base_rates]
    # A group that came later has no base rate; steps refuse it, and their error is the one to be seen.
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    return rates
