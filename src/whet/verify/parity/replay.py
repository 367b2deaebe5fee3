"""Replay each operator of a step on the CPU, with the inputs that it had on the device."""

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

# --- location of an operator ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OperatorLocation:
    """The location of an operator in a training step."""

    phase: str
    """Phase of the step: "forward", "backward" or "update"."""
    module: str | None = None
    line: str | None = None
    """Line of user code, such as "file.py:42"."""


class OperatorLocator:
    """Finds the module and the line of user code of each operator, including those in the backward pass."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._optimizer = optimizer
        self._open_modules: list[str] = []
        self._is_updating = False
        self._forward: dict[int, OperatorLocation] = {}
        """Locations of forward operators, by the sequence number of their autograd node."""

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Return a context manager that tracks the operators of one step."""
        self._forward.clear()
        hooks = []
        for module, name in self._names.items():
            hooks.append(module.register_forward_pre_hook(self._enter(name)))
            hooks.append(module.register_forward_hook(self._leave, always_call=True))
        if self._optimizer is not None:
            hooks.append(self._optimizer.register_step_pre_hook(lambda *_: self._set_updating(True)))
            hooks.append(self._optimizer.register_step_post_hook(lambda *_: self._set_updating(False)))
        try:
            # Run the backward pass in this thread, so that its operators are recorded in order.
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def current(self) -> OperatorLocation:
        """Return the location of the running operator. Call this once per operator, from a dispatch mode."""
        node = torch._C._current_autograd_node()
        if node is not None:
            forward = self._forward.get(node._sequence_nr())
            if forward is None:
                return OperatorLocation("backward")
            return OperatorLocation("backward", forward.module, forward.line)
        if self._is_updating:
            return OperatorLocation("update")
        location = OperatorLocation("forward", self._open_modules[-1] if self._open_modules else None, _line())
        # torch creates the autograd node just before its operator runs. Later operators without a node must not replace
        # the location of that node.
        self._forward.setdefault(torch.autograd._get_sequence_nr() - 1, location)
        return location

    def _enter(self, name: str) -> Any:
        return lambda *_: self._open_modules.append(name)

    def _leave(self, *_: Any) -> None:
        if self._open_modules:
            self._open_modules.pop()

    def _set_updating(self, value: bool) -> None:
        self._is_updating = value


def _line() -> str | None:
    line = user_line()
    return None if line is None else f"{Path(line[0]).name}:{line[1]}"


# --- replay -----------------------------------------------------------------------------------------------------------

# Error of a single float32 operator that always counts as rounding, and the same if the error of the CPU is unknown.
# The gradient of a convolution before BatchNorm cancels, with an error of up to 4e-5 on a correct CPU.
MIN_BOUND, BOUND_WITHOUT_REFERENCE = 1e-5, 1e-4
# Operators whose minimum bound is BOUND_WITHOUT_REFERENCE. GPUs may compute convolutions with Winograd transforms,
# which have larger rounding errors than a plain sum. Fused updates on CUDA round 1 - beta to float32, which causes an
# error of 1e-5 (1.3e-5 measured on an H200).
COARSE_OPERATORS = ("aten::convolution", "aten::cudnn_convolution", "aten::mkldnn_convolution", "aten::_fused_")
# Rounding error of a dtype relative to float32.
_ROUNDING = {torch.float32: 1.0, torch.float16: 2.0**13, torch.bfloat16: 2.0**16}
_EPSILON = 2.0**-24
_DROPOUT = torch.ops.aten.native_dropout
# Operators whose result is uninitialized memory or not a tensor.
_WITHOUT_VALUES = ("aten::empty", "aten::new_empty", "aten::resize", "aten::set_", "aten::_local_scalar_dense")
# Operators for which the order of equal values is undefined.
_UNSTABLE_ORDER = ("aten::argmax", "aten::argmin", "aten::argsort", "aten::sort", "aten::topk")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLayout:
    """The memory layout of a tensor. Some kernels produce wrong results only for certain layouts."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_on_cpu: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class WrongOperatorCall:
    """An operator call whose result differs from the CPU, with its arguments, so that it can be repeated."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """Keyword arguments. Like `args`, they are copies on the CPU from before the call."""
    layouts: tuple[TensorLayout, ...]
    """Layouts of all tensor arguments, in order."""
    expected: tuple[Tensor, ...]
    is_formula: bool
    """Whether the expected result comes from a formula instead of the CPU's kernel."""
    location: OperatorLocation
    error: float
    bound: float
    """Bound of the result that exceeds its bound by the largest factor. `error` is the error of the same result."""
    bounds: tuple[float, ...]
    """Maximum relative error of each result."""
    floors: tuple[float, ...]
    """Minimum denominator of the relative error of each result."""


@dataclass(slots=True)
class ReplayResult:
    """The results of replaying the operators of a step."""

    first: WrongOperatorCall | None = None
    wrong: dict[str, int] = field(default_factory=dict)
    """Number of wrong calls by operator, in the order of the first wrong call."""
    draws: set[str] = field(default_factory=set)
    """Operators that draw random numbers, which cannot be compared."""
    unknown: set[str] = field(default_factory=set)
    """Operators that the CPU cannot compute, which were not checked."""
    num_checked: int = 0


class OperatorReplay(TorchDispatchMode):
    """A dispatch mode that checks every operator that runs on the device."""

    def __init__(self, device: AbstractDevice, locator: OperatorLocator, *, least: float = 0.0) -> None:
        super().__init__()
        self._least = least
        self.result = ReplayResult()
        self._device = device
        self._locator = locator

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled in this mode. If this returned True, torch would import its compiler, which takes seconds.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        location = self._locator.current()
        if not self._is_checked(func, args, kwargs):
            return func(*args, **kwargs)
        before = copy_to_cpu((args, kwargs))
        layouts = tuple(_layout(tensor) for tensor in tensor_leaves((args, list(kwargs.values()))))
        returned = func(*args, **kwargs)
        self._check(func, before, CompletedCall(returned, args, kwargs), layouts, location)
        return returned

    def _is_checked(self, func: Any, args: Any, kwargs: Any) -> bool:
        name = func.name()
        if torch.Tag.nondeterministic_seeded in func.tags and _argument(func, args, kwargs, "dropout_p") != 0:
            if self._uses_device(args, kwargs):
                self.result.draws.add(_base_name(name))
            return func.overloadpacket is _DROPOUT
        if name.startswith((*_WITHOUT_VALUES, *_UNSTABLE_ORDER)) or _is_view(func):
            return False
        is_plain = all(t.layout == torch.strided and not t.is_complex() for t in tensor_leaves((args, kwargs)))
        return is_plain and self._uses_device(args, kwargs)

    def _uses_device(self, args: Any, kwargs: Any) -> bool:
        kind = self._device.torch_device.type
        places = [leaf.device if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves((args, kwargs))]
        return any(isinstance(place, torch.device) and place.type == kind for place in places)

    def _check(
        self,
        func: Any,
        before: Any,
        call: CompletedCall,
        layouts: tuple[TensorLayout, ...],
        location: OperatorLocation,
    ) -> None:
        actual, is_dropout = call_outputs(func, call, before), func.overloadpacket is _DROPOUT
        if not actual:
            return
        reference = _dropout_reference(call, before) if is_dropout else reference_result(func, *before)
        expected = _expected_outputs(func, reference, before, actual)
        if expected is None:
            self.result.unknown.add(_base_name(func.name()))
            return
        self.result.num_checked += 1
        floors = _floors(func, before, expected)
        errors = _errors(actual, expected, floors)
        cpu_errors: list[float] | None = None
        if not self._device.is_cpu and reference.own is not None:
            cpu_errors = _errors(call_outputs(func, reference.own, before), expected, floors)
        dtypes = {t.dtype for t in tensor_leaves(before) if t.dtype in _ROUNDING}
        is_coarse = cpu_errors is None or func.name().startswith(COARSE_OPERATORS)
        minimum = BOUND_WITHOUT_REFERENCE if is_coarse else MIN_BOUND
        minimum = max(self._least, min(0.1, minimum * max((_ROUNDING[dtype] for dtype in dtypes), default=1.0)))
        bounds = [error_bound(minimum, cpu_errors[index] if cpu_errors else None) for index in range(len(errors))]
        error, bound = max(zip(errors, bounds, strict=True), key=lambda pair: pair[0] / pair[1])
        if error <= bound:
            return
        name = _base_name(func.name())
        self.result.wrong[name] = self.result.wrong.get(name, 0) + 1
        if self.result.first is None:
            self.result.first = WrongOperatorCall(
                func=func,
                args=before[0],
                kwargs=before[1],
                layouts=layouts,
                expected=tuple(expected),
                is_formula=reference.is_formula,
                location=location,
                error=error,
                bound=bound,
                bounds=tuple(bounds),
                floors=floors,
            )


def _dropout_reference(call: CompletedCall, before: Any) -> ReferenceResult:
    """Return the expected result of dropout for the mask that it drew."""
    x, share = before[0][0].double(), before[0][1]
    mask = call.returned[1].cpu().double()
    return ReferenceResult(CompletedCall((x * mask / (1 - share),), (), {}), None, is_formula=True)


def call_outputs(func: Any, call: CompletedCall, before: Any) -> list[Tensor]:
    """Return the result tensors and the written arguments of a call, on the CPU.

    Integer tensors are included only if there are no floating-point tensors. Otherwise, they are usually indices, which
    are ambiguous for equal values.
    """
    written = tensor_leaves(written_arguments(func, call.args, call.kwargs))
    if func.name().startswith("aten::_fused_"):
        # The error of a fused update is small relative to the weights, so compare the changes of the weights.
        old = tensor_leaves(written_arguments(func, *before))
        return [new.detach().cpu().double() - was.double() for new, was in zip(written, old, strict=True)]
    tensors = [tensor.detach().cpu() for tensor in (*tensor_leaves(call.returned), *written)]
    return [tensor for tensor in tensors if tensor.is_floating_point()] or tensors


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that the operator writes to, according to its schema."""
    written = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return written


def _expected_outputs(func: Any, reference: ReferenceResult, before: Any, actual: list[Tensor]) -> list[Tensor] | None:
    """Return the expected tensors: in float64, or for integer and bool results from a call with the original dtypes.

    Return None if the result is unknown.
    """
    is_value = actual[0].is_floating_point()
    call = (reference.float64 or reference.own) if is_value else (reference.own or reference.float64)
    if call is None:
        return None
    expected = call_outputs(func, call, before)
    return expected[: len(actual)] or None


def _errors(actual: list[Tensor], expected: list[Tensor], floors: tuple[float, ...]) -> list[float]:
    if len(actual) < len(expected):
        return [math.inf] * len(expected)
    return [relative_error(a, b, floor=floor) for a, b, floor in zip(actual, expected, floors, strict=False)]


def _floors(func: Any, before: Any, expected: list[Tensor]) -> tuple[float, ...]:
    if func.name().startswith("aten::_fused_"):
        # The change of a weight is only as accurate as the weight itself.
        old = tensor_leaves(written_arguments(func, *before))
        return tuple(4 * _EPSILON / MIN_BOUND * max_abs(was) for was in old)
    return tuple(max(SMALL_TENSOR_SHARE * max_abs(expected), _sum_noise(func, before, one)) for one in expected)


def _sum_noise(func: Any, before: Any, result: Tensor) -> float:
    """Return the error floor of a reduction: if a sum should be zero, its result is the rounding error of its terms."""
    count = max((tensor.numel() for tensor in tensor_leaves(before)), default=0)
    if torch.Tag.reduction not in func.tags or not result.is_floating_point() or count <= result.numel():
        return 0.0
    return 4 * _EPSILON / MIN_BOUND * (count / max(1, result.numel())) * max_abs(before)


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Return the value of a named argument, or None if the operator has no such argument."""
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
    aliases = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _base_name(name: str) -> str:
    """Return the name of an operator without its overload, such as aten::add for aten::add.Tensor."""
    return name.partition(".")[0]
