"""Optimizers that are built by name, with the kernels that the plan selects, and AdamATan2."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.base.errors import UsageError
from whet.device.abstract import AbstractDevice
from whet.distributed.strategies import is_distributed

OPTIMIZER_NAMES = ("adamw", "adafactor", "sgd", "adam_atan2")

EXECUTION_KEYS = ("fused", "foreach", "capturable", "differentiable")
"""Keys of parameter groups that select kernels. They are not restored, because the current plan determines them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerChoice:
    """An optimizer that whet builds, with the kernels that the plan selects."""

    name: str = "adamw"
    lr: float = 3e-4
    weight_decay: float = 0.01
    table_lr: float | None = None
    """The learning rate of embedding tables of which each step uses only a few rows; None means `lr`."""
    table_weight_decay: float | None = None

    def base_rates(self, optimizer: Optimizer) -> list[float]:
        """Return the learning rate of each parameter group of the built optimizer."""
        table_lr = self.lr if self.table_lr is None else self.table_lr
        return [table_lr if group.get("is_table") else self.lr for group in optimizer.param_groups]


def build_optimizer(
    choice: OptimizerChoice,
    model: nn.Module,
    device: AbstractDevice,
    *,
    kernels: str = "fused",
    is_captured: bool = False,
) -> Optimizer:
    """Build an optimizer for the trainable parameters. Only adam_atan2 applies weight decay to biases and norms.

    With `is_captured`, all per-step values are kept on the device.
    """
    name, lr = choice.name, choice.lr
    groups = decay_groups(model.parameters(), weight_decay=choice.weight_decay)
    # Fused kernels do not support complex numbers.
    is_real = not any(p.is_complex() for group in groups for p in group["params"])
    fused, foreach = kernels == "fused" and is_real, kernels == "foreach"
    if name == "sgd" and fused and any(is_distributed(p) for group in groups for p in group["params"]):
        # torch's fused SGD does not support sharded parameters.
        fused, foreach = False, True
    # A tensor learning rate can be changed in place, without a new graph. Fused kernels accept one.
    rate: Any = torch.tensor(lr, dtype=device.lr_dtype, device=device.torch_device) if fused or is_captured else lr
    if name == "adamw":
        adamw = torch.optim.AdamW(groups, lr=rate, fused=fused, foreach=foreach, capturable=is_captured)
        # torch warns about eager steps of a capturable optimizer. Here, they are intended: they precede a capture.
        adamw._warned_capturable_if_run_uncaptured = True
        return adamw
    if name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=0.9, fused=fused, foreach=foreach)
    if name == "adam_atan2":
        groups = atan2_groups(model, choice)
        foreach = kernels != "loop" and is_real
        return AdamATan2(groups, lr=rate if is_captured else lr, foreach=foreach, capturable=is_captured)
    if name == "adafactor":
        return torch.optim.Adafactor(groups, lr=lr, foreach=foreach)
    raise UsageError("no such optimizer", got=name, try_=" or ".join(OPTIMIZER_NAMES))


def decay_groups(parameters: Iterable[nn.Parameter], *, weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameter groups: matrices with weight decay, vectors (biases and norms) without."""
    trainable = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def atan2_groups(model: nn.Module, choice: OptimizerChoice) -> list[dict[str, Any]]:
    """Return the parameter groups, all with weight decay. Each module with `is_table = True` gets its own group.

    The method `seen_rows` of such a module returns a mask of the rows that the current step uses. The group holds it as
    a function, so checkpoints leave it out.
    """
    modules = [module for module in model.modules() if getattr(module, "is_table", False)]
    tables = [(p, module.seen_rows) for module in modules for p in module.parameters(False) if p.requires_grad]
    others = [p for p in model.parameters() if p.requires_grad and all(p is not table for table, _ in tables)]
    decay = choice.weight_decay if choice.table_weight_decay is None else choice.table_weight_decay
    groups: list[dict[str, Any]] = [
        {"params": others, "weight_decay": choice.weight_decay},
        *(
            {"params": [table], "weight_decay": decay, "is_table": True, "seen_rows": seen_rows}
            for table, seen_rows in tables
        ),
    ]
    return [group for group in groups if group["params"]]


# --- AdamATan2 --------------------------------------------------------------------------------------------------------


class AdamATan2(Optimizer):
    """Adam with atan2 instead of a division: it needs no epsilon, and the learning rate bounds each update.

        w <- w (1 - lr decay)
        m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2
        w <- w - lr / (1 - b1^t) atan2(m, sqrt(v) / sqrt(1 - b2^t))

    Groups with `is_table` (embedding tables of which a step uses few rows) are updated by sign instead:
    w <- w (1 - lr decay) - lr sign(g), for the rows that `seen_rows` marks. With `capturable`, all per-step values are
    on the device.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        foreach: bool = True,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "foreach": foreach,
            "capturable": capturable,
            "is_table": False,
            "seen_rows": None,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            gradients = [cast(Tensor, p.grad) for p in trained]
            if group["is_table"]:
                for table, gradient in zip(trained, gradients, strict=True):
                    _sign_update(table, gradient, group)
                continue
            batches = (trained,) if group["foreach"] else ([p] for p in trained)
            for params in batches:
                if params:
                    self._update(params, group)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        gradients = [cast(Tensor, p.grad) for p in params]
        states = [self._state_of(p, group) for p in params]
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        steps = [state["step"] for state in states]
        # The order of operations matches torch's AdamW: decay, then moments, then the update.
        torch._foreach_add_(steps, 1.0)
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        scales = torch._foreach_sqrt(squares)
        corrections = [_correction(step, beta1, beta2, group) for step in steps]
        torch._foreach_div_(scales, [second for _, second in corrections])
        # atan2 has no foreach kernel.
        for param, mean, scale, (first, _) in zip(params, means, scales, corrections, strict=True):
            param.sub_(torch.atan2(mean, scale).mul_(lr / first))

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[param]
        if not state:
            # If the rate is a tensor, its dtype is one the device supports: Metal has no float64.
            dtype = group["lr"].dtype if isinstance(group["lr"], Tensor) else torch.float64
            device = param.device if group["capturable"] else "cpu"
            state["step"] = torch.zeros((), dtype=dtype, device=device)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state


def _correction(step: Tensor, beta1: float, beta2: float, group: dict[str, Any]) -> tuple[Any, Any]:
    """Return 1 - b1^t and sqrt(1 - b2^t). If capturable, they are tensors, because a capture cannot read values."""
    if group["capturable"]:
        return 1 - beta1**step, (1 - beta2**step).sqrt()
    count = float(step)
    return 1 - beta1**count, (1 - beta2**count) ** 0.5


def _sign_update(table: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
    """Update the rows in use. They decay even if their gradient is zero. Gradients of a row used twice are summed."""
    is_seen = group["seen_rows"]()[:, None]
    decayed = table * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * gradient.sign()
    table.copy_(torch.where(is_seen, decayed, table))
