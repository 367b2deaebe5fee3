"""Relative errors between tensors, and the bounds below which two results count as equal."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import PlainSerializer
from torch import Tensor

RelativeError = Annotated[
    float, PlainSerializer(lambda value: value if math.isfinite(value) else str(value), when_used="json")
]
"""A relative error in a record; a word in JSON, which has no infinity."""

FP32_TOLERANCE = 1e-4
"""The largest error in float32, relative to the largest value: far above rounding, far below a wrong result."""
HALF_TOLERANCES = {torch.float16: 5e-3, torch.bfloat16: 4e-2}
CPU_ERROR_FACTOR = 20
"""A device may err so many times as much as the CPU itself does in the same number format."""
_FLOAT32_SUFFICES = (torch.float32, torch.bfloat16, torch.float16)
"""Whose differences float32 holds well enough."""
SMALL_TENSOR_SHARE = 1e-2
"""A tensor whose values are smaller than this share of the tree's largest is measured against that share: a gradient
that should be zero is rounding noise on every device."""


def tensor_leaves(tree: Any) -> list[Tensor]:
    """All tensors of nested tuples, lists and dicts, in their order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [leaf for value in tree.values() for leaf in tensor_leaves(value)]
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        return [leaf for value in tree for leaf in tensor_leaves(value)]
    return []


def relative_error(found: Any, expected: Any, *, floor: float = 0.0) -> float:
    """The largest difference, relative to the largest value that was expected, or to `floor` if that is larger;
    infinite where shapes, NaNs, infinities or whole numbers differ."""
    ours, theirs = [_on_cpu(t) for t in tensor_leaves(found)], [_on_cpu(t) for t in tensor_leaves(expected)]
    if not theirs or [t.shape for t in ours] != [t.shape for t in theirs]:
        return math.inf
    floor = max(floor, SMALL_TENSOR_SHARE * max(_tensor_max_abs(t) for t in theirs))
    return max(_tensor_error(a, b, floor=floor) for a, b in zip(ours, theirs, strict=True))


def relative_errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """The error of every named tensor, all measured as parts of one tree; infinite for one that only one side has."""
    floor = SMALL_TENSOR_SHARE * max((_tensor_max_abs(_on_cpu(t)) for t in expected.values()), default=0.0)
    names = [*expected, *(name for name in found if name not in expected)]
    return {
        name: relative_error(found[name], expected[name], floor=floor)
        if name in found and name in expected
        else math.inf
        for name in names
    }


def error_bound(least: float, own_error: float | None) -> float:
    """What counts as agreement: `least`, or more where the CPU itself errs in the same number format."""
    return least if own_error is None or math.isnan(own_error) else max(least, CPU_ERROR_FACTOR * own_error)


def max_abs(tree: Any) -> float:
    """The largest finite value of all floating-point tensors, without its sign."""
    return max((_tensor_max_abs(_on_cpu(t)) for t in tensor_leaves(tree)), default=0.0)


def _on_cpu(tensor: Tensor) -> Tensor:
    # First to the CPU, then to another type: a copy that does both at once is itself under suspicion.
    on_cpu = tensor.detach().cpu()
    return torch.view_as_real(on_cpu) if on_cpu.is_complex() else on_cpu


def _tensor_max_abs(tensor: Tensor) -> float:
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return 0.0
    low, high = tensor.aminmax()
    if bool(low.isfinite() & high.isfinite()):
        # As almost always: 20 times as fast as looking for what is not a number.
        return max(-float(low), float(high))
    values = tensor.double().abs()
    return float(values[values.isfinite()].max()) if bool(values.isfinite().any()) else 0.0


def _tensor_error(ours: Tensor, theirs: Tensor, *, floor: float) -> float:
    if ours.numel() == 0:
        return 0.0
    if not theirs.is_floating_point():
        return 0.0 if torch.equal(ours.long(), theirs.long()) else math.inf
    at_once = torch.float32 if ours.dtype in _FLOAT32_SUFFICES and theirs.dtype in _FLOAT32_SUFFICES else torch.float64
    worst = float((ours.to(at_once) - theirs.to(at_once)).abs().max())
    if math.isfinite(worst):
        # Then all numbers are finite.
        return worst / max(_tensor_max_abs(theirs), floor, 1e-30) if worst else 0.0
    ours, theirs = ours.double(), theirs.double()
    is_number = theirs.isfinite()
    if not torch.equal(ours[~is_number].nan_to_num(nan=0.5), theirs[~is_number].nan_to_num(nan=0.5)):
        return math.inf
    if not bool(is_number.any()):
        return 0.0
    difference = (ours[is_number] - theirs[is_number]).abs()
    if not bool(difference.isfinite().all()):
        return math.inf
    worst = float(difference.max())
    return worst / max(_tensor_max_abs(theirs), floor, 1e-30) if worst else 0.0
