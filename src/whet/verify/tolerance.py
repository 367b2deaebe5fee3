"""Relative errors between tensors, and the bounds up to which two results count as equal."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import PlainSerializer
from torch import Tensor

# JSON has no infinity and no NaN, so they are serialized as strings.
RelativeError = Annotated[
    float, PlainSerializer(lambda value: value if math.isfinite(value) else str(value), when_used="json")
]

# Maximum relative error that counts as float32 rounding. It is far above rounding and far below a wrong result.
FP32_TOLERANCE = 1e-4
HALF_TOLERANCES = {torch.float16: 5e-3, torch.bfloat16: 4e-2}
# A device may be this many times less accurate than the CPU in the same dtype.
CPU_ERROR_FACTOR = 20
# Errors of small tensors are relative to this fraction of the largest value of all tensors, because a gradient that
# should be zero is rounding noise on every device.
SMALL_TENSOR_SHARE = 1e-2
# Dtypes whose differences are computed in float32, which is faster than float64.
_FLOAT32_SUFFICES = (torch.float32, torch.bfloat16, torch.float16)
_TINY = 1e-30


def tensor_leaves(tree: Any) -> list[Tensor]:
    """Return all tensors of nested tuples, lists and dicts, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [leaf for value in tree.values() for leaf in tensor_leaves(value)]
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        return [leaf for value in tree for leaf in tensor_leaves(value)]
    return []


def relative_error(actual: Any, expected: Any, *, floor: float = 0.0) -> float:
    """Return the largest error of all tensors: the difference, relative to the tensor's largest expected value.

    The error of a small tensor is relative to `floor`, or to a fraction of the largest value of all tensors. The result
    is infinite if shapes, NaNs, infinities or integers differ.
    """
    actuals, expecteds = [_on_cpu(t) for t in tensor_leaves(actual)], [_on_cpu(t) for t in tensor_leaves(expected)]
    if not expecteds or [t.shape for t in actuals] != [t.shape for t in expecteds]:
        return math.inf
    floor = max(floor, SMALL_TENSOR_SHARE * max(_tensor_max_abs(t) for t in expecteds))
    return max(_tensor_error(a, b, floor=floor) for a, b in zip(actuals, expecteds, strict=True))


def relative_errors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the error of every named tensor, with a common floor; infinity for a name that only one side has."""
    floor = SMALL_TENSOR_SHARE * max((_tensor_max_abs(_on_cpu(t)) for t in expected.values()), default=0.0)
    errors = {}
    for name in (*expected, *(name for name in actual if name not in expected)):
        is_shared = name in actual and name in expected
        errors[name] = relative_error(actual[name], expected[name], floor=floor) if is_shared else math.inf
    return errors


def error_bound(minimum: float, cpu_error: float | None) -> float:
    """Return the largest error that counts as agreement: `minimum`, or more if the CPU itself is inaccurate."""
    return minimum if cpu_error is None or math.isnan(cpu_error) else max(minimum, CPU_ERROR_FACTOR * cpu_error)


def max_abs(tree: Any) -> float:
    """Return the largest finite absolute value of all floating-point tensors."""
    return max((_tensor_max_abs(_on_cpu(t)) for t in tensor_leaves(tree)), default=0.0)


def _on_cpu(tensor: Tensor) -> Tensor:
    # Copy first and convert later, because MPS gives wrong results for copies that also convert.
    on_cpu = tensor.detach().cpu()
    return torch.view_as_real(on_cpu) if on_cpu.is_complex() else on_cpu


def _tensor_max_abs(tensor: Tensor) -> float:
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return 0.0
    low, high = tensor.aminmax()
    if bool(low.isfinite() & high.isfinite()):
        # This common case is 20 times faster than masking non-finite values.
        return max(-float(low), float(high))
    values = tensor.double().abs()
    return float(values[values.isfinite()].max()) if bool(values.isfinite().any()) else 0.0


def _tensor_error(actual: Tensor, expected: Tensor, *, floor: float) -> float:
    if actual.numel() == 0:
        return 0.0
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual.long(), expected.long()) else math.inf
    is_narrow = actual.dtype in _FLOAT32_SUFFICES and expected.dtype in _FLOAT32_SUFFICES
    dtype = torch.float32 if is_narrow else torch.float64
    worst = float((actual.to(dtype) - expected.to(dtype)).abs().max())
    if not math.isfinite(worst):
        # Non-finite values must be the same on both sides. Only finite values are subtracted.
        actual, expected = actual.double(), expected.double()
        finite = expected.isfinite()
        if not torch.equal(actual[~finite].nan_to_num(nan=0.5), expected[~finite].nan_to_num(nan=0.5)):
            return math.inf
        if not bool(finite.any()):
            return 0.0
        difference = (actual[finite] - expected[finite]).abs()
        if not bool(difference.isfinite().all()):
            return math.inf
        worst = float(difference.max())
    return worst / max(_tensor_max_abs(expected), floor, _TINY) if worst else 0.0
