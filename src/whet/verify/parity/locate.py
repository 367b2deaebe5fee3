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
from whet.verify.draws import RecordedDraws, UnrepeatableDrawError
from whet.verify.parity.replay import OperatorLocator, OperatorReplay
from whet.verify.parity.reproducer import write_reproducer
from whet.verify.parity.training import ReplicaFactory
from whet.verify.tolerance import RelativeError, relative_error

# Maximum relative error of a module that counts as rounding. It is large, because a module may contain many operators.
MODULE_BOUND = 1e-3


class WrongOperator(FrozenModel):
    """The first wrong operator, or the first wrong module if no operator is known to be wrong."""

    operator: str | None = None
    """Name of the operator, or None if only the module is known."""
    phase: str
    """Phase of the step: "forward", "backward" or "update"."""
    module: str | None = None
    line: str | None = None
    error: RelativeError
    bound: RelativeError
    step: int = 1


class LocateResult(FrozenModel):
    """The results of replaying every operator of a step on the CPU."""

    culprit: WrongOperator | None = None
    wrong: dict[str, int] = Field(default_factory=dict)
    """Number of wrong calls by operator."""
    draws: tuple[str, ...] = ()
    """Operators that draw random numbers."""
    unknown: tuple[str, ...] = ()
    """Operators without a CPU kernel, which were not checked."""
    num_checked: int = 0
    reproducer: str | None = None
    """Path of the program that reproduces the wrong operator, or None if none was written."""


def locate(
    replicas: ReplicaFactory, device: AbstractDevice, *, steps: int = 1, least: float = 0.0, out: Path | None = None
) -> LocateResult:
    """Replay steps until an operator has an error above `least`. Write a program that reproduces it to `out`.

    If no operator is wrong and `least` is 0, look for the first wrong module.
    """
    with replicas.on(device) as replica:
        optimizer = replica.optimizer()
        locator = OperatorLocator(replica.model, optimizer)
        replay = OperatorReplay(device, locator, least=least)
        stepper = replica.stepper(optimizer)
        for number in range(1, steps + 1):
            try:
                with locator.tracking(), replay:
                    replica.step(stepper, number)
            except UnrepeatableDrawError:
                # The draws differ between steps. Only the steps before this one were compared.
                if number == 1:
                    raise
                break
            if replay.result.first is not None:
                break
    result, first = replay.result, replay.result.first
    culprit, reproducer = None, None
    if first is not None:
        culprit = WrongOperator(
            operator=first.func.name().partition(".")[0],
            phase=first.location.phase,
            module=first.location.module,
            line=first.location.line,
            error=first.error,
            bound=first.bound,
            step=number,
        )
        # A reproducer of a random operator would draw different numbers, so do not write one.
        if out is not None and torch.Tag.nondeterministic_seeded not in first.func.tags:
            reproducer = str(write_reproducer(first, out, device=str(device.torch_device)))
    elif not device.is_cpu and not least:
        # The error must be in an operator that cannot be checked, or in code that bypasses torch's dispatcher.
        wrong = first_wrong_module(replicas, device)
        if wrong is not None:
            culprit = WrongOperator(phase=wrong.phase, module=wrong.name, error=wrong.error, bound=wrong.bound)
    return LocateResult(
        culprit=culprit,
        wrong=result.wrong,
        draws=tuple(sorted(result.draws)),
        unknown=tuple(sorted(result.unknown)),
        num_checked=result.num_checked,
        reproducer=reproducer,
    )


# --- modules ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ModuleCall:
    """A recorded call of a module on the CPU."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """Gradients of the output tensors, by the index of the tensor in the output."""


@dataclass(frozen=True, slots=True)
class WrongModule:
    name: str
    phase: str
    error: float
    bound: float = MODULE_BOUND


def first_wrong_module(replicas: ReplicaFactory, device: AbstractDevice) -> WrongModule | None:
    """Return the first module with wrong outputs or gradients, or None.

    Inner modules are checked before their parents. Each module gets its inputs and gradients from the CPU, so that
    errors do not propagate, and uses the same random draws as on the CPU.
    """
    calls = _module_calls(replicas)
    with replicas.on(CpuDevice()) as on_cpu, replicas.on(device) as replica:
        references, modules = dict(on_cpu.model.named_modules()), dict(replica.model.named_modules())
        for call in calls:
            error = _module_error(_outputs, references[call.name], modules[call.name], call, device)
            if not error <= MODULE_BOUND:
                return WrongModule(call.name, "forward", error)
    backward_order = [call for call in reversed(calls) if call.gradients]
    with replicas.on(CpuDevice()) as on_cpu, replicas.on(device) as replica:
        references, modules = dict(on_cpu.model.named_modules()), dict(replica.model.named_modules())
        for call in sorted(backward_order, key=lambda call: any(True for _ in references[call.name].children())):
            error = _module_error(_gradients, references[call.name], modules[call.name], call, device)
            if not error <= MODULE_BOUND:
                return WrongModule(call.name, "backward", error)
    return None


def _module_calls(replicas: ReplicaFactory) -> list[ModuleCall]:
    """Run a step on the CPU, and record all module calls in the order in which they return."""
    ended: list[ModuleCall] = []
    running: list[ModuleCall] = []
    with replicas.on(CpuDevice()) as replica:

        def enter(name: str) -> Callable[..., None]:
            def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
                running.append(ModuleCall(name, _clone(args), _clone(kwargs)))

            return hook

        def leave(_: nn.Module, __: Any, ___: Any, output: Any) -> None:
            call = running.pop()
            for index, leaf in enumerate(tree_leaves(output)):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(_gradient_hook(call, index))
            ended.append(call)

        for name, module in replica.model.named_modules():
            module.register_forward_pre_hook(enter(name), with_kwargs=True)
            module.register_forward_hook(leave, with_kwargs=True)
        replica.step(replica.stepper(torch.optim.SGD(replica.model.parameters(), lr=0.0)))
    return ended


def _gradient_hook(call: ModuleCall, index: int) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        call.gradients[index] = gradient.detach().clone()

    return hook


def _clone(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


def _call(module: nn.Module, call: ModuleCall, put: Callable[[Tensor], Tensor]) -> tuple[Any, list[Tensor]]:
    """Call the module with the recorded inputs. Return its output, and the inputs that can have a gradient."""
    sources: list[Tensor] = []

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensor = put(leaf.clone())
        if not tensor.is_floating_point():
            return tensor
        sources.append(tensor.requires_grad_())
        # Return a non-leaf copy, because torch does not allow in-place changes of leaf tensors that require gradients.
        return tensor * 1

    return module(*tree_map(moved, call.args), **tree_map(moved, call.kwargs)), sources


def _module_error(
    compute: "_Compute", reference: nn.Module, module: nn.Module, call: ModuleCall, device: AbstractDevice
) -> float:
    """Return the relative error of the tensors that `compute` returns for a module, or 0 if draws are unrepeatable."""
    draws = RecordedDraws()
    try:
        with draws.record_or_repeat():
            expected = compute(reference, call, lambda tensor: tensor)
        with draws.record_or_repeat():
            actual = compute(module, call, device.put) if expected else []
    except UnrepeatableDrawError:
        return 0.0
    # Compare all tensors together. A gradient that cancels to rounding noise, such as that of a bias before BatchNorm,
    # would fail on its own.
    return relative_error(actual, expected) if expected else 0.0


def _outputs(module: nn.Module, call: ModuleCall, put: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return the floating-point outputs of the module."""
    output, _ = _call(module, call, put)
    return [leaf.detach() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _gradients(module: nn.Module, call: ModuleCall, put: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return the gradients of the inputs and parameters of the module."""
    output, sources = _call(module, call, put)
    outputs = tree_leaves(output)
    wanted = [*sources, *(p for p in module.parameters() if p.requires_grad)]
    if not wanted:
        return []
    gradients = torch.autograd.grad(
        [outputs[index] for index in call.gradients],
        wanted,
        [put(gradient) for gradient in call.gradients.values()],
        allow_unused=True,
        materialize_grads=True,
    )
    return [gradient.detach().cpu() for gradient in gradients]


_Compute = Callable[[nn.Module, ModuleCall, Callable[[Tensor], Tensor]], list[Tensor]]
