"""Locate the first wrong operator or module of a step on a device."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from whet.base.model import FrozenModel
from whet.device.abstract import AbstractDevice
from whet.device.cpu import CpuDevice
from whet.verify.parity.replay import OperatorLocator, OperatorReplay
from whet.verify.parity.reproducer import write_reproducer
from whet.verify.parity.training import ReplicaFactory
from whet.verify.tolerance import RelativeError, relative_error

MODULE_BOUND = 1e-3
"""A module's own largest relative error that counts as rounding: it may be deep."""


@dataclass(slots=True)
class ModuleCall:
    """One call of a module on the CPU."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """Of the output's tensors, by their place."""


@dataclass(frozen=True, slots=True)
class WrongModule:
    name: str
    phase: str
    error: float
    bound: float = MODULE_BOUND


def first_wrong_module(bench: ReplicaFactory, device: AbstractDevice) -> WrongModule | None:
    """The first whose own outputs or gradients differ; an inner one comes before the one that holds it."""
    visits = _module_calls(bench)
    with bench.at(device) as placed:
        modules = dict(placed.model.named_modules())

        def put(tensor: Tensor) -> Tensor:
            return device.put(tensor)

        for visit in visits:
            error = _forward_error(modules[visit.name], visit, put)
            if not error <= MODULE_BOUND:
                return WrongModule(visit.name, "forward", error)
    inner_first = [visit for visit in reversed(visits) if visit.gradients]
    with bench.at(CpuDevice()) as on_cpu, bench.at(device) as placed:
        theirs, ours = dict(on_cpu.model.named_modules()), dict(placed.model.named_modules())
        for visit in sorted(inner_first, key=lambda visit: any(True for _ in theirs[visit.name].children())):
            expected = _gradients(theirs[visit.name], visit, lambda tensor: tensor)
            error = (
                relative_error(_gradients(ours[visit.name], visit, placed.device.put), expected) if expected else 0.0
            )
            if not error <= MODULE_BOUND:
                return WrongModule(visit.name, "backward", error)
    return None


def _module_calls(bench: ReplicaFactory) -> list[ModuleCall]:
    """Every call of every module, in the order in which they end."""
    ended: list[ModuleCall] = []
    under_way: list[ModuleCall] = []
    with bench.at(CpuDevice()) as placed:

        def enter(name: str) -> Callable[..., None]:
            def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
                under_way.append(ModuleCall(name, _kept(args), _kept(kwargs)))

            return hook

        def leave(_: nn.Module, __: Any, ___: Any, output: Any) -> None:
            visit = under_way.pop()
            visit.output = _kept(output)
            for place, leaf in enumerate(tree_leaves(output)):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(_keep_gradient(visit, place))
            ended.append(visit)

        for name, module in placed.model.named_modules():
            module.register_forward_pre_hook(enter(name), with_kwargs=True)
            module.register_forward_hook(leave, with_kwargs=True)
        placed.step(placed.stepper(torch.optim.SGD(placed.model.parameters(), lr=0.0)))
    return ended


def _keep_gradient(visit: ModuleCall, place: int) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        visit.gradients[place] = gradient.detach().clone()

    return hook


def _kept(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


def _call(module: nn.Module, visit: ModuleCall, put: Callable[[Tensor], Tensor]) -> tuple[Any, list[Tensor]]:
    """The output from the inputs of the CPU, and those inputs that can have a gradient."""
    sources: list[Tensor] = []

    def given(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        moved = put(leaf.clone())
        if not moved.is_floating_point():
            return moved
        sources.append(moved.requires_grad_())
        # A module that changes its input in place may not be given a leaf.
        return moved * 1

    return module(*tree_map(given, visit.args), **tree_map(given, visit.kwargs)), sources


def _forward_error(module: nn.Module, visit: ModuleCall, put: Callable[[Tensor], Tensor]) -> float:
    output, _ = _call(module, visit, put)
    pairs = [(ours, right) for ours, right in zip(tree_leaves(output), tree_leaves(visit.output), strict=True)]
    return max((relative_error(a, b) for a, b in pairs if isinstance(b, Tensor) and b.is_floating_point()), default=0.0)


def _gradients(module: nn.Module, visit: ModuleCall, put: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Of the inputs and the module's own parameters."""
    output, sources = _call(module, visit, put)
    outputs = tree_leaves(output)
    wanted = [*sources, *(p for p in module.parameters() if p.requires_grad)]
    if not wanted:
        return []
    found = torch.autograd.grad(
        [outputs[place] for place in visit.gradients],
        wanted,
        [put(gradient) for gradient in visit.gradients.values()],
        allow_unused=True,
        materialize_grads=True,
    )
    return [gradient.detach().cpu() for gradient in found]


class WrongOperator(FrozenModel):
    """What is wrong first."""

    operator: str | None = None
    """None where only the module is known."""
    phase: str
    """forward, backward or update"""
    module: str | None = None
    line: str | None = None
    error: RelativeError
    bound: RelativeError
    step: int = 1


class LocateResult(FrozenModel):
    """What a step showed whose operators were replayed one by one on the CPU."""

    culprit: WrongOperator | None = None
    wrong: dict[str, int] = Field(default_factory=dict)
    """Every wrong operator with the number of its wrong calls."""
    draws: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    """Operators that the CPU has no kernel for: they were not judged."""
    num_judged: int = 0
    reproducer: str | None = None


def locate(bench: ReplicaFactory, device: AbstractDevice, *, steps: int = 1, out: Path | None = None) -> LocateResult:
    """Looks at whole steps on the device until an operator is wrong; writes a program that shows it alone to `out`."""
    with bench.at(device) as placed:
        optimizer = placed.optimizer()
        whereabouts = OperatorLocator(placed.model, optimizer)
        replay = OperatorReplay(device, whereabouts)
        stepper = placed.stepper(optimizer)
        for number in range(1, steps + 1):
            with whereabouts.followed(), replay:
                placed.step(stepper, number)
            if replay.findings.first is not None:
                break
    found, first = replay.findings, replay.findings.first
    culprit, reproducer = None, None
    if first is not None:
        culprit = WrongOperator(
            operator=first.func.name().partition(".")[0],
            phase=first.spot.phase,
            module=first.spot.module,
            line=first.spot.line,
            error=first.error,
            bound=first.bound,
            step=number,
        )
        if out is not None:
            reproducer = str(write_reproducer(first, out, device=str(device.place)))
    elif device.kind != "cpu":
        # No single operator is wrong: one that could not be judged, or code that torch's dispatcher does not see.
        wrong = first_wrong_module(bench, device)
        if wrong is not None:
            culprit = WrongOperator(phase=wrong.phase, module=wrong.name, error=wrong.error, bound=wrong.bound)
    return LocateResult(
        culprit=culprit,
        wrong=found.wrong,
        draws=tuple(sorted(found.draws)),
        unknown=tuple(sorted(found.unknown)),
        num_judged=found.num_judged,
        reproducer=reproducer,
    )
