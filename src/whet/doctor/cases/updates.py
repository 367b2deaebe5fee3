"""What happens to weights after the backward pass: optimizers, clipping, averages, loss scaling."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from whet.doctor.case import Case, Finding, Place
from whet.doctor.cases.comparing import compared
from whet.doctor.cases.trying import draw, refusal
from whet.verify.agreement import CLOSE

_STEPS = 4
Make = Callable[[Any], Optimizer]


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def _weights_after(make: Make, model: nn.Module, where: torch.device) -> list[torch.Tensor]:
    """The weights after some steps with the same gradients everywhere: only the optimizer is examined."""
    model = copy.deepcopy(model).to(where)
    optimizer = make(model.parameters())
    for step in range(_STEPS):
        for place, parameter in enumerate(model.parameters()):
            parameter.grad = draw(*parameter.shape, seed=10 * step + place).to(where)
        optimizer.step()
    return list(model.parameters())


def _try_optimizer(make: Make, place: Place) -> Finding:
    model = _net()
    expected = _weights_after(make, model, torch.device("cpu"))
    try:
        found = _weights_after(make, model, place.device.place)
    except Exception as error:
        return refusal(error)
    return compared(found, expected, right="equal", wrong="differs from the CPU")


def _try_both(compute: Callable[[torch.device], Any], place: Place, tolerance: float = CLOSE) -> Finding:
    expected = compute(torch.device("cpu"))
    try:
        found = compute(place.device.place)
    except Exception as error:
        return refusal(error)
    return compared(found, expected, tolerance=tolerance, right="equal", wrong="differs from the CPU")


def _clip(where: torch.device) -> Any:
    model = _net().to(where)
    model(draw(9, 8).to(where)).pow(2).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return norm, [p.grad for p in model.parameters()]


def _average(where: torch.device) -> Any:
    averages = [draw(8, 16).to(where), draw(16, seed=1).to(where)]
    torch._foreach_lerp_(averages, [draw(8, 16, seed=2).to(where), draw(16, seed=3).to(where)], 0.1)
    return averages


def _scaled(where: torch.device) -> Any:
    """Two steps with a scaled loss end where two plain ones do; the scale divides out exactly."""
    model = _net().to(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(where.type, init_scale=1024.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(draw(9, 8).to(where)).pow(2).mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return list(model.parameters())


def _optimizer(name: str, make: Make, *, is_quick: bool = False) -> Case:
    return Case(name=name, run=partial(_try_optimizer, make), is_quick=is_quick)


UPDATES: list[Case] = [
    _optimizer("AdamW", lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False)),
    _optimizer("AdamW, foreach", lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True)),
    _optimizer("AdamW, fused", lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), is_quick=True),
    _optimizer("Adam, fused and amsgrad", lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, fused=True)),
    _optimizer("SGD, momentum", lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True)),
    _optimizer("SGD, fused", lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True)),
    _optimizer("Adafactor", lambda p: torch.optim.Adafactor(p, lr=1e-2)),
    _optimizer("RMSprop", lambda p: torch.optim.RMSprop(p, lr=1e-2)),
    Case(name="clip_grad_norm", run=partial(_try_both, _clip), is_quick=True),
    Case(name="average of weights (lerp)", run=partial(_try_both, _average)),
    Case(name="GradScaler", run=partial(_try_both, _scaled)),
]
