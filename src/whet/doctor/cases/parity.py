"""Does a model train here as it does on the CPU, and does the same step give the same bits twice?"""

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from whet.doctor.case import Case, Figure, Finding, Place, differs, good
from whet.doctor.cases.models import Task, convnet_task, transformer_task
from whet.verify.agreement import error_of, errors_by_name

STEPS = 20
GRADIENTS, UPDATE, TRAJECTORY = 1e-3, 1e-4, 1e-2
"""The largest relative errors that count as agreement; rounding grows along a trajectory."""


def _one_step(task: Task, where: torch.device) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The loss, every gradient, and every weight after a step of SGD: AdamW's first would blow up rounding."""
    model = copy.deepcopy(task.model).to(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = task.loss(model)
    loss.backward()
    gradients = {name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return loss.detach().cpu(), gradients, {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def _losses(task: Task, where: torch.device) -> Tensor:
    """The losses of some steps of fused AdamW."""
    model = copy.deepcopy(task.model).to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = task.loss(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def _parity(make: Callable[[], Task], place: Place) -> Finding:
    task, cpu, here = make(), torch.device("cpu"), place.device.place
    (loss, gradients, weights), (our_loss, our_gradients, our_weights) = _one_step(task, cpu), _one_step(task, here)
    expected = _losses(task, cpu)
    if our_gradients.keys() != gradients.keys():
        return differs("not every parameter got a gradient", missing=len(gradients) - len(our_gradients))
    by_name = errors_by_name(our_gradients, gradients)
    worst = max(by_name, key=lambda name: by_name[name])
    figures: dict[str, Figure] = {
        "loss_error": error_of(our_loss, loss),
        "gradient_error": by_name[worst],
        "worst_gradient": worst,
        "update_error": error_of(our_weights, weights),
        "trajectory_error": error_of(_losses(task, here), expected),
        "num_gradients": len(gradients),
        "num_steps": STEPS,
        "first_loss": float(expected[0]),
        "last_loss": float(expected[-1]),
    }
    limits = {
        "loss_error": UPDATE,
        "gradient_error": GRADIENTS,
        "update_error": UPDATE,
        "trajectory_error": TRAJECTORY,
    }
    # `not <=` and not `>`: a NaN is over every limit.
    over = [name.replace("_", " ") for name, limit in limits.items() if not float(figures[name] or 0.0) <= limit]
    if over:
        return differs(f"differs from the CPU: {', '.join(over)}", **figures)
    return good(f"loss, {len(gradients)} gradients, a step and {STEPS} losses agree with the CPU", **figures)


def _same_twice(make: Callable[[], Task], place: Place) -> Finding:
    task, here = make(), place.device.place
    one, other = _one_step(task, here), _one_step(task, here)
    different = [name for name in one[2] if not torch.equal(one[2][name], other[2][name])]
    if not different and torch.equal(one[0], other[0]):
        return good("the same step twice gives the same bits")
    error = error_of(other[2], one[2])
    what = f"the same step twice gives other bits in {len(different)} of {len(one[2])} tensors"
    if error <= UPDATE and place.device.kind == "cuda":
        # CUDA says so itself: some sums are taken as they happen to finish; deterministic=on avoids them.
        return good(f"{what}, by rounding", error=error, num_different=len(different))
    return differs(what, error=error, num_different=len(different))


CASES: list[Case] = [
    Case(name="transformer against the CPU", run=partial(_parity, transformer_task), is_quick=True),
    Case(name="convnet against the CPU", run=partial(_parity, convnet_task)),
    Case(name="transformer, the same step twice", run=partial(_same_twice, transformer_task), is_quick=True),
    Case(name="convnet, the same step twice", run=partial(_same_twice, convnet_task)),
]
