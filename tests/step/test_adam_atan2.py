"""AdamATan2: equal to its formula, however it is executed; tables learn by sign in the rows that were seen."""

import math

import pytest
import torch
from torch import Tensor, nn

from whet.device.cpu import CpuDevice
from whet.recipes.puzzle.model import PuzzleTable
from whet.step.optimizers import AdamATan2, OptimizerChoice, build_optimizer
from whet.training.schedule import set_learning_rate

pytestmark = pytest.mark.torch

SHAPES = ((3, 5), (7,), (2, 2, 4))


@pytest.mark.parametrize("how", ["foreach", "loop", "capturable"])
def test_a_hundred_steps_equal_the_formula_in_float64(how: str) -> None:
    lr, betas, decay = 1e-2, (0.9, 0.95), 0.1
    draw = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64)) for shape in SHAPES]
    rate = torch.tensor(lr, dtype=torch.float64) if how == "capturable" else lr
    optimizer = AdamATan2(
        params, rate, betas=betas, weight_decay=decay, foreach=how != "loop", capturable=how == "capturable"
    )
    ours = [[(float(w), 0.0, 0.0) for w in p.detach().flatten()] for p in params]
    for step in range(1, 101):
        for number, param in enumerate(params):
            # Gradients of very different sizes, and some that are zero: there is no epsilon.
            gradient = torch.randn(param.shape, generator=draw, dtype=torch.float64) * 10.0 ** (3 * number - 6)
            param.grad = torch.where(gradient.abs() < 0.1 * gradient.abs().max(), 0.0, gradient)
            grads = param.grad.flatten().tolist()
            ours[number] = [
                formula(*state, g, step, lr, betas, decay) for state, g in zip(ours[number], grads, strict=True)
            ]
        optimizer.step()
    for number, param in enumerate(params):
        expected = torch.tensor([w for w, _, _ in ours[number]], dtype=torch.float64).reshape(param.shape)
        assert torch.allclose(param.detach(), expected, rtol=1e-12, atol=1e-14)


def formula(
    w: float, m: float, v: float, g: float, t: int, lr: float, betas: tuple[float, float], decay: float
) -> tuple[float, float, float]:
    """The scalar formula, as documented."""
    b1, b2 = betas
    w *= 1 - lr * decay
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    return w - lr / (1 - b1**t) * math.atan2(m, math.sqrt(v) / math.sqrt(1 - b2**t)), m, v


def test_a_table_learns_by_sign_in_the_rows_seen_and_with_a_rate_of_its_own() -> None:
    model = nn.ModuleDict({"table": PuzzleTable(5, 3), "linear": nn.Linear(3, 2)})
    table = model["table"].weight
    with torch.no_grad():
        table.copy_(torch.arange(15.0).reshape(5, 3))
    before = table.detach().clone()
    choice = OptimizerChoice(name="adam_atan2", lr=1e-3, weight_decay=0.5, table_lr=0.1, table_weight_decay=1.0)
    optimizer = build_optimizer(choice, model, CpuDevice())
    rates = choice.base_rates(optimizer)
    assert rates == [1e-3, 0.1]
    set_learning_rate(optimizer, 0.5, rates)
    # Row 1 is seen twice: its gradients are summed before the sign is taken.
    puzzles = torch.tensor([1, 1, 2, 4])
    seen = model["table"](puzzles)
    model["table"].mark_seen(torch.tensor([0, 3]), is_first=True)
    model["table"].mark_seen(puzzles[:2], is_first=True)
    model["table"].mark_seen(puzzles[2:], is_first=False)
    (seen * torch.tensor([[1.0], [-3.0], [0.0], [2.0]])).sum().backward()
    optimizer.step()
    # Row 2 is seen, but has no gradient: it decays. Rows 0 and 3 belong to an earlier step.
    signs: dict[int, Tensor] = {1: torch.full((3,), -1.0), 2: torch.zeros(3), 4: torch.full((3,), 1.0)}
    for row in range(5):
        expected = before[row] * (1 - 0.05) - 0.05 * signs[row] if row in signs else before[row]
        assert torch.allclose(table.detach()[row], expected), row
