"""AdamATan2: Adam whose quotient is an angle, so that it needs no epsilon and no step is longer than its rate allows.

    w <- w (1 - lr decay)
    m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2
    w <- w - lr / (1 - b1^t) atan2(m, sqrt(v) / sqrt(1 - b2^t))

A table of which a step sees few rows learns by sign instead: w <- w (1 - lr decay) - lr sign(g), for the rows seen.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer


class AdamATan2(Optimizer):
    """Groups with `is_table` learn by sign. A capturable one keeps every number that a step changes on the device."""

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
                    _learn_by_sign(table, gradient, group)
                continue
            lists = (trained,) if group["foreach"] else ([p] for p in trained)
            for some in lists:
                if some:
                    self._update(some, group)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        gradients = [cast(Tensor, p.grad) for p in params]
        states = [self._state_of(p, group) for p in params]
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1.0)
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        scales = torch._foreach_sqrt(squares)
        corrections = [_correction(step, beta1, beta2, group) for step in steps]
        torch._foreach_div_(scales, [second for _, second in corrections])
        for param, mean, scale, (first, _) in zip(params, means, scales, corrections, strict=True):
            param.sub_(torch.atan2(mean, scale).mul_(lr / first))

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[param]
        if not state:
            # As wide as the rate where it lies on the device: Metal has no float64.
            wide = group["lr"].dtype if isinstance(group["lr"], Tensor) else torch.float64
            place = param.device if group["capturable"] else "cpu"
            state["step"] = torch.zeros((), dtype=wide, device=place)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state


def _correction(step: Tensor, beta1: float, beta2: float, group: dict[str, Any]) -> tuple[Any, Any]:
    """1 - b1^t and sqrt(1 - b2^t): tensors where nothing may be read from the device."""
    if group["capturable"]:
        return 1 - beta1**step, (1 - beta2**step).sqrt()
    count = float(step)
    return 1 - beta1**count, (1 - beta2**count) ** 0.5


def _learn_by_sign(table: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
    """A row that was not seen has no gradient at all; the gradients of one seen several times are summed in it."""
    is_seen = (gradient != 0).any(dim=-1, keepdim=True)
    decayed = table * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * gradient.sign()
    table.copy_(torch.where(is_seen, decayed, table))
