"""Replay each operator of a step on the CPU, from the inputs that the device gave it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whet.device.abstract import AbstractDevice
from whet.verify.parity.references import CompletedCall, ReferenceResult, copy_to_cpu, reference_result
from whet.verify.preflight.findings import user_line
from whet.verify.tolerance import SMALL_TENSOR_SHARE, error_bound, max_abs, relative_error, tensor_leaves


@dataclass(frozen=True, slots=True)
class OperatorLocation:
    """A place in a training step."""

    phase: str
    """forward, backward or update"""
    module: str | None = None
    line: str | None = None
    """file.py:42"""


class OperatorLocator:
    """Follows a step: which module computes, and which forward operator a backward one belongs to."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._optimizer = optimizer
        self._open: list[str] = []
        self._is_updating = False
        self._forward: dict[int, OperatorLocation] = {}
        """By the number that autograd gives to the node of a forward operator."""

    @contextmanager
    def followed(self) -> Iterator[None]:
        """While a step is made."""
        self._forward.clear()
        hooks = []
        for module, name in self._names.items():
            hooks.append(module.register_forward_pre_hook(self._enter(name)))
            hooks.append(module.register_forward_hook(self._leave, always_call=True))
        if self._optimizer is not None:
            hooks.append(self._optimizer.register_step_pre_hook(lambda *_: self._set_updating(True)))
            hooks.append(self._optimizer.register_step_post_hook(lambda *_: self._set_updating(False)))
        try:
            # One thread: what is noted on the way must be in the order of the operators.
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def here(self) -> OperatorLocation:
        """The place of the operator that is at work; to be asked from a dispatch mode, once for each."""
        node = torch._C._current_autograd_node()
        if node is not None:
            forward = self._forward.get(node._sequence_nr())
            return (
                OperatorLocation("backward")
                if forward is None
                else OperatorLocation("backward", forward.module, forward.line)
            )
        if self._is_updating:
            return OperatorLocation("update")
        spot = OperatorLocation("forward", self._open[-1] if self._open else None, _line())
        # The node was made just before its operator runs; operators without one come later and must not replace it.
        self._forward.setdefault(torch.autograd._get_sequence_nr() - 1, spot)
        return spot

    def _enter(self, name: str) -> Any:
        return lambda *_: self._open.append(name)

    def _leave(self, *_: Any) -> None:
        if self._open:
            self._open.pop()

    def _set_updating(self, value: bool) -> None:
        self._is_updating = value


def _line() -> str | None:
    line = user_line()
    return None if line is None else f"{Path(line[0]).name}:{line[1]}"


MIN_BOUND, BOUND_WITHOUT_REFERENCE = 1e-5, 1e-4
"""The largest error of a single operator in float32 that counts as rounding: whatever the CPU's own is, and where that
is not known. A convolution's gradient before a BatchNorm cancels: 4e-5 is seen there on a sound CPU."""
COARSE_OPERATORS = ("aten::convolution", "aten::cudnn_convolution", "aten::mkldnn_convolution", "aten::_fused_")
"""`BOUND_WITHOUT_REFERENCE` is their least bound. GPUs may compute convolutions by Winograd's transforms, which round more than a plain
sum; fused updates on CUDA round 1 - beta in float32, which is 1e-5 of it (1.3e-5 seen on an H200)."""
_ROUNDING = {torch.float32: 1.0, torch.float16: 2.0**13, torch.bfloat16: 2.0**16}
"""How much coarser a number format rounds than float32."""
_EPSILON = 2.0**-24
_UNSET = ("aten::empty", "aten::new_empty", "aten::resize", "aten::set_", "aten::_local_scalar_dense")
"""Their values are nobody's, or no tensor."""
_TIES = ("aten::argmax", "aten::argmin", "aten::argsort", "aten::sort", "aten::topk")
"""Equal values may come in any order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLayout:
    """How a tensor lay in memory: some kernels are wrong for some layouts only."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_on_cpu: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class WrongOperatorCall:
    """A call of an operator whose result is not the CPU's, with all that is needed to make it again."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """As the call got them, on the CPU."""
    layouts: tuple[TensorLayout, ...]
    """Of every tensor among them, in order."""
    expected: tuple[Tensor, ...]
    is_formula: bool
    """Whether the CPU has no such operator, so that only the expected result can be compared with."""
    spot: OperatorLocation
    error: float
    bound: float
    """Of the result that is furthest beyond its own."""
    bounds: tuple[float, ...]
    floors: tuple[float, ...]
    """What each result is measured against, at least."""


@dataclass(slots=True)
class ReplayResult:
    """What a replayed step showed."""

    first: WrongOperatorCall | None = None
    wrong: dict[str, int] = field(default_factory=dict)
    """Every wrong operator, with the number of its wrong calls, in the order of their first."""
    draws: set[str] = field(default_factory=set)
    """Operators that draw random numbers: they cannot be compared."""
    unknown: set[str] = field(default_factory=set)
    """Operators that the CPU cannot compute."""
    num_judged: int = 0


class OperatorReplay(TorchDispatchMode):
    """Judges every operator that runs on a device while it is entered."""

    def __init__(self, device: AbstractDevice, whereabouts: OperatorLocator) -> None:
        super().__init__()
        self.findings = ReplayResult()
        self._device = device
        self._where = whereabouts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        spot = self._where.here()
        if not self._is_judged(func, args, kwargs):
            return func(*args, **kwargs)
        before = copy_to_cpu((args, kwargs))
        layouts = tuple(_layout(tensor) for tensor in tensor_leaves((args, list(kwargs.values()))))
        returned = func(*args, **kwargs)
        self._judge(func, before, CompletedCall(returned, args, kwargs), layouts, spot)
        return returned

    def _is_judged(self, func: Any, args: Any, kwargs: Any) -> bool:
        name = func.name()
        if torch.Tag.nondeterministic_seeded in func.tags and _argument(func, args, kwargs, "dropout_p") != 0:
            if self._is_here(args, kwargs):
                self.findings.draws.add(_base(name))
            return False
        if name.startswith((*_UNSET, *_TIES)) or _is_view(func):
            return False
        is_plain = all(t.layout == torch.strided and not t.is_complex() for t in tensor_leaves((args, kwargs)))
        return is_plain and self._is_here(args, kwargs)

    def _is_here(self, args: Any, kwargs: Any) -> bool:
        kind = self._device.place.type
        found = [leaf.device if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves((args, kwargs))]
        return any(isinstance(device, torch.device) and device.type == kind for device in found)

    def _judge(
        self, func: Any, before: Any, done: CompletedCall, layouts: tuple[TensorLayout, ...], spot: OperatorLocation
    ) -> None:
        found = call_outputs(func, done, before)
        if not found:
            return
        expected = reference_result(func, *before)
        right = _right(func, expected, before, found)
        if right is None:
            self.findings.unknown.add(_base(func.name()))
            return
        self.findings.num_judged += 1
        floors = _floors(func, before, right)
        errors = _errors(found, right, floors)
        owns: list[float] | None = None
        if self._device.kind != "cpu" and expected.own is not None:
            owns = _errors(call_outputs(func, expected.own, before), right, floors)
        formats = {t.dtype for t in tensor_leaves(before) if t.dtype in _ROUNDING}
        least = BOUND_WITHOUT_REFERENCE if owns is None or func.name().startswith(COARSE_OPERATORS) else MIN_BOUND
        least = min(0.1, least * max((_ROUNDING[dtype] for dtype in formats), default=1.0))
        bounds = [error_bound(least, owns[index] if owns else None) for index in range(len(errors))]
        error, bound = max(zip(errors, bounds, strict=True), key=lambda pair: pair[0] / pair[1])
        if error <= bound:
            return
        name = _base(func.name())
        self.findings.wrong[name] = self.findings.wrong.get(name, 0) + 1
        if self.findings.first is None:
            self.findings.first = WrongOperatorCall(
                func=func,
                args=before[0],
                kwargs=before[1],
                layouts=layouts,
                expected=tuple(right),
                is_formula=expected.is_formula,
                spot=spot,
                error=error,
                bound=bound,
                bounds=tuple(bounds),
                floors=floors,
            )


def call_outputs(func: Any, done: CompletedCall, before: Any) -> list[Tensor]:
    """What a call gave, on the CPU: returned tensors and changed arguments. Whole numbers count only where there is
    nothing else: beside a value they tell where it was found, and equal values are found in any order."""
    changed = tensor_leaves(changed_arguments(func, done.args, done.kwargs))
    if func.name().startswith("aten::_fused_"):
        # A fused optimizer: a wrong update is small beside the weight that it changes, so the change itself counts.
        were = tensor_leaves(changed_arguments(func, *before))
        return [now.detach().cpu().double() - was.double() for now, was in zip(changed, were, strict=True)]
    found = [tensor.detach().cpu() for tensor in (*tensor_leaves(done.returned), *changed)]
    return [tensor for tensor in found if tensor.is_floating_point()] or found


def changed_arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that the operator's schema says it writes to."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return found


def _right(func: Any, expected: ReferenceResult, before: Any, found: list[Tensor]) -> list[Tensor] | None:
    """The right results: in float64, but for decisions (a comparison with 0.1 depends on the number format)."""
    is_number = found[0].is_floating_point()
    chosen = (expected.wide or expected.own) if is_number else (expected.own or expected.wide)
    if chosen is None:
        return None
    right = call_outputs(func, chosen, before)
    return right[: len(found)] or None


def _errors(found: list[Tensor], right: list[Tensor], floors: tuple[float, ...]) -> list[float]:
    """Of each result; a zero of the reference may be noise here, so small results count beside the largest."""
    if len(found) < len(right):
        return [math.inf] * len(right)
    return [relative_error(a, b, floor=floor) for a, b, floor in zip(found, right, floors, strict=False)]


def _floors(func: Any, before: Any, right: list[Tensor]) -> tuple[float, ...]:
    if func.name().startswith("aten::_fused_"):
        # A change of weights is known to the rounding of the weights.
        return tuple(4 * _EPSILON / MIN_BOUND * max_abs(was) for was in tensor_leaves(changed_arguments(func, *before)))
    return tuple(max(SMALL_TENSOR_SHARE * max_abs(right), _noise(func, before, one)) for one in right)


def _noise(func: Any, before: Any, result: Tensor) -> float:
    """What a sum is measured against, at least: one that should be zero is the rounding of its terms."""
    count = max((tensor.numel() for tensor in tensor_leaves(before)), default=0)
    if torch.Tag.reduction not in func.tags or not result.is_floating_point() or count <= result.numel():
        return 0.0
    return 4 * _EPSILON / MIN_BOUND * (count / max(1, result.numel())) * max_abs(before)


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """The value that a call gives to a named argument; None where the operator has no such argument."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[index] if index < len(args) else kwargs.get(name, argument.default_value)
    return None


def _layout(tensor: Tensor) -> TensorLayout:
    return TensorLayout(
        size=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
        is_on_cpu=tensor.device.type == "cpu",
    )


def _is_view(func: Any) -> bool:
    returned = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def _base(name: str) -> str:
    """aten::add for aten::add.Tensor"""
    return name.partition(".")[0]
