"""Which known wrong results of this machine does the model really meet?"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from whet.plan.hazard_table import Hazard
from whet.plan.warnings import ROW_LIMIT
from whet.verify.preflight.findings import Detection, Detector, OperatorCall
from whet.verify.preflight.host_sync import HOST_READS

_HUGE_BATCH = 65_536
_LARGE_KERNEL = 256
_MOST_RESULTS = 2**32
_PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}
"""Where an operator has its two factors."""


class KnownFaultDetector(Detector):
    """Compares calls with the conditions of the faults that apply; those that no trace can see are left out."""

    def __init__(self, hazards: Iterable[Hazard]) -> None:
        self._hazards = {hazard.id: hazard for hazard in hazards}

    def operator(self, call: OperatorCall) -> Iterable[Detection]:
        if call.phase == "making":
            return
        for name, is_met in _BY_OPERATOR.items():
            if name in self._hazards and is_met(call):
                seen = fault_detection(self._hazards[name])
                yield _with_rows(seen, call) if name == "linear-rows" else seen

    def function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Detection]:
        for name, is_met in _BY_FUNCTION.items():
            if name in self._hazards and is_met(function, args, kwargs):
                yield fault_detection(self._hazards[name])


def fault_detection(hazard: Hazard) -> Detection:
    return Detection(f"known-fault/{hazard.id}", "warning", f"{hazard.what} (pytorch{hazard.issue})", hazard.answer)


def _with_rows(seen: Detection, call: OperatorCall) -> Detection:
    """With the number that it is; a plan keeps only those few that grow with the micro-batch."""
    summed = call.args[_PRODUCTS[call.base][0]].shape[-1]
    cure = (
        f"at most {ROW_LIMIT:,} there: a smaller micro-batch if it grows with that; if these are the words of a head, "
        "its product in pieces, torch after 2.13, or --device cpu"
    )
    return replace(seen, what=f"{seen.what}; this one sums over {summed:,}", try_=cure)


def _sums_many_rows(call: OperatorCall) -> bool:
    factors = _PRODUCTS.get(call.base)
    return factors is not None and call.args[factors[0]].shape[-1] > ROW_LIMIT


def _is_large_bmm(call: OperatorCall) -> bool:
    return call.base in ("bmm", "baddbmm") and call.outputs[0].numel() > _MOST_RESULTS


def _is_expanded(call: OperatorCall) -> bool:
    factors = _PRODUCTS.get(call.base)
    return factors is not None and any(_has_zero_stride(call.args[index]) for index in factors)


def _has_zero_stride(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _weight(call: OperatorCall) -> Tensor | None:
    """That of a 2-d convolution."""
    weight = call.args[1] if call.base == "convolution" else None
    return weight if isinstance(weight, Tensor) and weight.dim() == 4 else None


def _has_strided_weight(call: OperatorCall) -> bool:
    weight = _weight(call)
    return weight is not None and not weight.is_contiguous()


def _has_large_kernel(call: OperatorCall) -> bool:
    weight = _weight(call)
    return weight is not None and max(weight.shape[2:]) >= _LARGE_KERNEL


def _is_channels_last(call: OperatorCall) -> bool:
    if _weight(call) is None:
        return False
    x = call.args[0]
    return not x.is_contiguous() and bool(x.is_contiguous(memory_format=torch.channels_last))


def _is_uneven_max_pool(call: OperatorCall) -> bool:
    if call.base != "adaptive_max_pool2d":
        return False
    sizes = zip(call.inputs[0].shape[-2:], call.outputs[0].shape[-2:], strict=True)
    return any(max(a, b) % max(min(a, b), 1) for a, b in sizes)


def _fills_gaps(call: OperatorCall) -> bool:
    return call.base in ("masked_fill", "masked_fill_") and not call.inputs[0].is_contiguous()


def _linear(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """What goes into a linear layer that has a bias."""
    if function is not functional.linear or not args:
        return None
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    return None if bias is None else args[0]


def _is_huge_batch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    x = _linear(function, args, kwargs)
    return x is not None and x.dim() > 2 and max(x.shape[:-1]) > _HUGE_BATCH


def _is_vector(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    x = _linear(function, args, kwargs)
    return x is not None and x.dim() == 1


def _is_lstm_with_dropout(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:  # noqa: ARG001
    if getattr(function, "__name__", "") != "lstm" or len(args) < 9:
        return False
    # Packed or not, these stand in the same places from behind or from the front.
    numbers = [value for value in args if isinstance(value, int | float) and not isinstance(value, bool)]
    return len(numbers) == 2 and numbers[0] > 1 and numbers[1] > 0


def _copies_to_host(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return function in (Tensor.cpu, Tensor.to) and bool(args) and HOST_READS[function].is_asking(args, kwargs)


def _converts_on_the_way(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if function is not Tensor.to or not _copies_to_host(function, args, kwargs):
        return False
    wanted = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.dtype)]
    return any(dtype != args[0].dtype for dtype in wanted)


def _copies_gaps(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return _copies_to_host(function, args, kwargs) and not args[0].is_contiguous()


def _does_not_wait(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:  # noqa: ARG001
    return function in (Tensor.to, Tensor.cpu, Tensor.copy_) and bool(kwargs.get("non_blocking"))


def _pins(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:  # noqa: ARG001
    return function is Tensor.pin_memory


_BY_OPERATOR: dict[str, Callable[[OperatorCall], bool]] = {
    "linear-rows": _sums_many_rows,
    "bmm-large": _is_large_bmm,
    "product-expanded": _is_expanded,
    "conv-weights": _has_strided_weight,
    "conv-kernel-256": _has_large_kernel,
    "channels-last": _is_channels_last,
    "adaptive-max-pool": _is_uneven_max_pool,
    "masked-fill": _fills_gaps,
}
_BY_FUNCTION: dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]] = {
    "linear-huge-batch": _is_huge_batch,
    "linear-vector-bias": _is_vector,
    "lstm-dropout-backward": _is_lstm_with_dropout,
    "lstm-dropout-forward": _is_lstm_with_dropout,
    "copy-converts": _converts_on_the_way,
    "copy-gaps": _copies_gaps,
    "copy-unawaited": _does_not_wait,
    "pinned-memory": _pins,
}
