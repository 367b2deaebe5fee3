"""Match operator calls against the known bugs of a machine's torch version."""

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
_MAX_BMM_ELEMENTS = 2**32
_MANY_TO_COUNT = 2**18
_BATCH_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "_batch_norm_with_update")
# Positions of the two factors among the arguments of each product.
_PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}


class KnownFaultDetector(Detector):
    """Reports calls that meet the conditions of a known fault. A trace cannot show all faults."""

    def __init__(self, hazards: Iterable[Hazard]) -> None:
        self._hazards = {hazard.id: hazard for hazard in hazards}

    def operator(self, call: OperatorCall) -> Iterable[Detection]:
        if call.phase == "making":
            return
        for name, is_met in _OPERATOR_CONDITIONS.items():
            if name in self._hazards and is_met(call):
                detection = fault_detection(self._hazards[name])
                yield _with_row_count(detection, call) if name == "linear-rows" else detection

    def function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Detection]:
        for name, is_met in _FUNCTION_CONDITIONS.items():
            if name in self._hazards and is_met(function, args, kwargs):
                yield fault_detection(self._hazards[name])


def fault_detection(hazard: Hazard) -> Detection:
    return Detection(f"known-fault/{hazard.id}", "warning", f"{hazard.what} (pytorch{hazard.issue})", hazard.answer)


def _with_row_count(detection: Detection, call: OperatorCall) -> Detection:
    """Return the detection with the number of rows and a more specific suggestion.

    The plan avoids only products that grow with the micro-batch. The user must change all others.
    """
    num_rows = call.args[_PRODUCTS[call.base][0]].shape[-1]
    try_ = (
        f"at most {ROW_LIMIT:,} there: a smaller micro-batch if it grows with that; for the vocabulary of an output "
        "head, nn.Linear, which whet computes in pieces, its product in chunks, torch 2.14, or --device cpu"
    )
    return replace(detection, what=f"{detection.what}; this one sums over {num_rows:,}", try_=try_)


# --- conditions on operators ------------------------------------------------------------------------------------------


def _sums_many_rows(call: OperatorCall) -> bool:
    factors = _PRODUCTS.get(call.base)
    return factors is not None and call.args[factors[0]].shape[-1] > ROW_LIMIT


def _is_large_bmm(call: OperatorCall) -> bool:
    return call.base in ("bmm", "baddbmm") and call.outputs[0].numel() > _MAX_BMM_ELEMENTS


def _has_expanded_factor(call: OperatorCall) -> bool:
    factors = _PRODUCTS.get(call.base)
    return factors is not None and any(_has_zero_stride(call.args[index]) for index in factors)


def _has_zero_stride(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _conv2d_weight(call: OperatorCall) -> Tensor | None:
    weight = call.args[1] if call.base == "convolution" else None
    return weight if isinstance(weight, Tensor) and weight.dim() == 4 else None


def _has_strided_weight(call: OperatorCall) -> bool:
    weight = _conv2d_weight(call)
    return weight is not None and not weight.is_contiguous()


def _has_large_kernel(call: OperatorCall) -> bool:
    weight = _conv2d_weight(call)
    return weight is not None and max(weight.shape[2:]) >= _LARGE_KERNEL


def _is_channels_last(call: OperatorCall) -> bool:
    if _conv2d_weight(call) is None:
        return False
    x = call.args[0]
    return not x.is_contiguous() and bool(x.is_contiguous(memory_format=torch.channels_last))


def _is_uneven_max_pool(call: OperatorCall) -> bool:
    if call.base != "adaptive_max_pool2d":
        return False
    sizes = zip(call.inputs[0].shape[-2:], call.outputs[0].shape[-2:], strict=True)
    return any(max(a, b) % max(min(a, b), 1) for a, b in sizes)


def _has_permuted_batch_norm(call: OperatorCall) -> bool:
    return call.base in _BATCH_NORMS and not call.inputs[0].is_contiguous()


def _has_permuted_batch_norm_3d(call: OperatorCall) -> bool:
    return _has_permuted_batch_norm(call) and call.inputs[0].dim() == 5


def _reduces_int64(call: OperatorCall) -> bool:
    return call.base in ("amax", "amin", "aminmax") and call.inputs[0].dtype == torch.int64


def _counts_many(call: OperatorCall) -> bool:
    # The last argument of _unique2 is return_counts, which is passed by position or by name.
    counts = call.kwargs.get("return_counts", call.args[3] if len(call.args) > 3 else False)
    return call.base == "_unique2" and bool(counts) and call.inputs[0].numel() > _MANY_TO_COUNT


def _writes_slice(call: OperatorCall) -> bool:
    out = call.kwargs.get("out")
    return call.base in _PRODUCTS and isinstance(out, Tensor) and out.untyped_storage().nbytes() > _num_bytes(out)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_vision(call: OperatorCall, *names: str) -> bool:
    return call.func.namespace == "torchvision" and call.base in names


def _fills_strided_tensor(call: OperatorCall) -> bool:
    return call.base in ("masked_fill", "masked_fill_") and not call.inputs[0].is_contiguous()


# --- conditions on functions ------------------------------------------------------------------------------------------


def _biased_linear_input(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the input of a linear layer that has a bias."""
    if function is not functional.linear or not args:
        return None
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    return None if bias is None else args[0]


def _is_huge_batch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    x = _biased_linear_input(function, args, kwargs)
    return x is not None and x.dim() > 2 and max(x.shape[:-1]) > _HUGE_BATCH


def _has_many_dimensions(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:  # noqa: ARG001
    return function is functional.linear and bool(args) and args[0].dim() > 4


def _is_inference_attention(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:  # noqa: ARG001
    return function is functional.scaled_dot_product_attention and not torch.is_grad_enabled()


def _is_permuted_lstm(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:  # noqa: ARG001
    return getattr(function, "__name__", "") == "lstm" and len(args) >= 9 and not args[0].is_contiguous()


def _is_vector(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    x = _biased_linear_input(function, args, kwargs)
    return x is not None and x.dim() == 1


def _is_lstm_with_dropout(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:  # noqa: ARG001
    if getattr(function, "__name__", "") != "lstm" or len(args) < 9:
        return False
    # Padded and packed calls have different argument orders. In both, num_layers and dropout are the only numbers.
    numbers = [value for value in args if isinstance(value, int | float) and not isinstance(value, bool)]
    return len(numbers) == 2 and numbers[0] > 1 and numbers[1] > 0


def _copies_to_host(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return function in (Tensor.cpu, Tensor.to) and bool(args) and HOST_READS[function].reads(args, kwargs)


def _copies_and_converts(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if function is not Tensor.to or not _copies_to_host(function, args, kwargs):
        return False
    dtypes = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.dtype)]
    return any(dtype != args[0].dtype for dtype in dtypes)


def _copies_strided_tensor(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return _copies_to_host(function, args, kwargs) and not args[0].is_contiguous()


def _is_non_blocking(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:  # noqa: ARG001
    return function in (Tensor.to, Tensor.cpu, Tensor.copy_) and bool(kwargs.get("non_blocking"))


def _pins_memory(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:  # noqa: ARG001
    return function is Tensor.pin_memory


_OPERATOR_CONDITIONS: dict[str, Callable[[OperatorCall], bool]] = {
    "linear-rows": _sums_many_rows,
    "bmm-large": _is_large_bmm,
    "product-expanded": _has_expanded_factor,
    "conv-weights": _has_strided_weight,
    "conv-kernel-256": _has_large_kernel,
    "channels-last": _is_channels_last,
    "adaptive-max-pool": _is_uneven_max_pool,
    "masked-fill": _fills_strided_tensor,
    "batch-norm-permuted": _has_permuted_batch_norm,
    "batch-norm-3d-abort": _has_permuted_batch_norm_3d,
    "amax-int64": _reduces_int64,
    "unique-counts": _counts_many,
    "product-out-slice": _writes_slice,
    "roi-align-backward": lambda call: _is_vision(call, "roi_align"),
    "roi-pool-backward": lambda call: _is_vision(call, "roi_pool", "ps_roi_align", "ps_roi_pool"),
}
_FUNCTION_CONDITIONS: dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]] = {
    "linear-huge-batch": _is_huge_batch,
    "linear-vector-bias": _is_vector,
    "lstm-dropout-backward": _is_lstm_with_dropout,
    "lstm-dropout-forward": _is_lstm_with_dropout,
    "copy-converts": _copies_and_converts,
    "copy-gaps": _copies_strided_tensor,
    "copy-unawaited": _is_non_blocking,
    "pinned-memory": _pins_memory,
    "pinned-recycled": _pins_memory,
    "linear-5d": _has_many_dimensions,
    "attention-hides-nan": _is_inference_attention,
    "lstm-permuted": _is_permuted_lstm,
}
