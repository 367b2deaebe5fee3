"""Match operator calls against the known bugs of a machine's torch version."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from whet.plan.hazard_table import Hazard
from whet.plan.warnings import ROW_LIMIT
from whet.verify.preflight.findings import Detection, Detector, FunctionCall, OperatorCall
from whet.verify.preflight.host_sync import HOST_READS

_MANY_TO_COUNT = 2**18
_BATCH_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "_batch_norm_with_update")
# Positions of the two factors in the arguments of each matrix product.
_PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}


class KnownFaultDetector(Detector):
    """Reports calls that meet the conditions of a known fault. Not all faults can be detected in a trace."""

    def __init__(self, hazards: Iterable[Hazard]) -> None:
        self._hazards = {hazard.id: hazard for hazard in hazards}

    def operator(self, call: OperatorCall) -> Iterable[Detection]:
        if call.phase == "init":
            return
        for name, is_met in _OPERATOR_CONDITIONS.items():
            if name in self._hazards and is_met(call):
                detection = fault_detection(self._hazards[name])
                yield _with_row_count(detection, call) if name == "linear-rows" else detection

    def function(self, call: FunctionCall) -> Iterable[Detection]:
        for name, is_met in _FUNCTION_CONDITIONS.items():
            if name in self._hazards and is_met(call):
                yield fault_detection(self._hazards[name])


def fault_detection(hazard: Hazard) -> Detection:
    return Detection(f"known-fault/{hazard.id}", "warning", f"{hazard.what} (pytorch{hazard.issue})", hazard.answer)


def _with_row_count(detection: Detection, call: OperatorCall) -> Detection:
    """Add the number of rows and a more specific suggestion to a detection.

    The plan avoids only products that grow with the micro-batch. The user must change all others.
    """
    num_rows = call.args[_PRODUCTS[call.base][0]].shape[-1]
    try_ = (
        f"at most {ROW_LIMIT:,} there: a smaller micro-batch if it grows with that; for the vocabulary of an output "
        "head, nn.Linear, which whet computes in pieces, its product in chunks, torch 2.14, or --device cpu"
    )
    return replace(detection, what=f"{detection.what}; this one sums over {num_rows:,}", try_=try_)


# --- operators --------------------------------------------------------------------------------------------------------


def _factors(call: OperatorCall) -> list[Tensor]:
    """Return the two factors of a matrix product. Empty for other operators."""
    return [call.args[index] for index in _PRODUCTS.get(call.base, ())]


def _has_zero_stride(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _conv2d_tensors(call: OperatorCall) -> list[Tensor]:
    """Return the input and the weight of a 2D convolution. Empty for other operators."""
    weight = call.args[1] if call.base == "convolution" else None
    return [call.args[0], weight] if isinstance(weight, Tensor) and weight.dim() == 4 else []


def _counts_many(call: OperatorCall) -> bool:
    # The last argument of _unique2 is return_counts, which may be passed by position or by name.
    counts = call.kwargs.get("return_counts", call.args[3] if len(call.args) > 3 else False)
    return call.base == "_unique2" and bool(counts) and call.inputs[0].numel() > _MANY_TO_COUNT


def _writes_slice(call: OperatorCall) -> bool:
    out = call.kwargs.get("out")
    return call.base in _PRODUCTS and isinstance(out, Tensor) and out.untyped_storage().nbytes() > out.nbytes


def _is_channels_last(tensor: Tensor) -> bool:
    return not tensor.is_contiguous() and bool(tensor.is_contiguous(memory_format=torch.channels_last))


def _has_permuted_batch_norm(call: OperatorCall) -> bool:
    return call.base in _BATCH_NORMS and not call.inputs[0].is_contiguous()


_OPERATOR_CONDITIONS: dict[str, Callable[[OperatorCall], bool]] = {
    "linear-rows": lambda call: any(factor.shape[-1] > ROW_LIMIT for factor in _factors(call)[:1]),
    "bmm-large": lambda call: call.base in ("bmm", "baddbmm") and call.outputs[0].numel() > 2**32,
    "product-expanded": lambda call: any(map(_has_zero_stride, _factors(call))),
    "conv-weights": lambda call: any(not weight.is_contiguous() for weight in _conv2d_tensors(call)[1:]),
    "conv-kernel-256": lambda call: any(max(weight.shape[2:]) >= 256 for weight in _conv2d_tensors(call)[1:]),
    "channels-last": lambda call: any(map(_is_channels_last, _conv2d_tensors(call)[:1])),
    "adaptive-max-pool": lambda call: call.base == "adaptive_max_pool2d" and call.has_uneven_sizes,
    "masked-fill": lambda call: call.base in ("masked_fill", "masked_fill_") and not call.inputs[0].is_contiguous(),
    "batch-norm-permuted": _has_permuted_batch_norm,
    "batch-norm-3d-abort": lambda call: _has_permuted_batch_norm(call) and call.inputs[0].dim() == 5,
    "amax-int64": lambda call: call.base in ("amax", "amin", "aminmax") and call.inputs[0].dtype == torch.int64,
    "unique-counts": _counts_many,
    "product-out-slice": _writes_slice,
    "roi-align-backward": lambda call: call.func.namespace == "torchvision" and call.base == "roi_align",
    "roi-pool-backward": lambda call: (
        call.func.namespace == "torchvision" and call.base in ("roi_pool", "ps_roi_align", "ps_roi_pool")
    ),
}


# --- functions --------------------------------------------------------------------------------------------------------


def _linear_input(call: FunctionCall, *, has_bias: bool = False) -> list[Tensor]:
    """Return the input of a linear layer, with `has_bias` only if it has a bias. Empty for other functions."""
    if call.function is not functional.linear or not call.args:
        return []
    bias = call.args[2] if len(call.args) > 2 else call.kwargs.get("bias")
    return [] if has_bias and bias is None else [call.args[0]]


def _is_lstm(call: FunctionCall) -> bool:
    return getattr(call.function, "__name__", "") == "lstm" and len(call.args) >= 9


def _is_lstm_with_dropout(call: FunctionCall) -> bool:
    # The order of arguments differs for padded and packed inputs. In both, num_layers and dropout are the only numbers.
    numbers = [value for value in call.args if isinstance(value, int | float) and not isinstance(value, bool)]
    return _is_lstm(call) and len(numbers) == 2 and numbers[0] > 1 and numbers[1] > 0


def _copies_to_host(call: FunctionCall) -> bool:
    is_copy = call.function in (Tensor.cpu, Tensor.to) and bool(call.args)
    return is_copy and HOST_READS[call.function].reads(call.args, call.kwargs)


def _copies_and_converts(call: FunctionCall) -> bool:
    if call.function is not Tensor.to or not _copies_to_host(call):
        return False
    dtypes = [value for value in (*call.args[1:], *call.kwargs.values()) if isinstance(value, torch.dtype)]
    return any(dtype != call.args[0].dtype for dtype in dtypes)


def _is_non_blocking(call: FunctionCall) -> bool:
    return call.function in (Tensor.to, Tensor.cpu, Tensor.copy_) and bool(call.kwargs.get("non_blocking"))


def _pins_memory(call: FunctionCall) -> bool:
    return call.function is Tensor.pin_memory


_FUNCTION_CONDITIONS: dict[str, Callable[[FunctionCall], bool]] = {
    "linear-huge-batch": lambda call: any(
        x.dim() > 2 and max(x.shape[:-1]) > 65_536 for x in _linear_input(call, has_bias=True)
    ),
    "linear-vector-bias": lambda call: any(x.dim() == 1 for x in _linear_input(call, has_bias=True)),
    "linear-5d": lambda call: any(x.dim() > 4 for x in _linear_input(call)),
    "lstm-dropout-backward": _is_lstm_with_dropout,
    "lstm-dropout-forward": _is_lstm_with_dropout,
    "lstm-permuted": lambda call: _is_lstm(call) and not call.args[0].is_contiguous(),
    "copy-converts": _copies_and_converts,
    "copy-gaps": lambda call: _copies_to_host(call) and not call.args[0].is_contiguous(),
    "copy-unawaited": _is_non_blocking,
    "pinned-memory": _pins_memory,
    "pinned-recycled": _pins_memory,
    "attention-hides-nan": lambda call: (
        call.function is functional.scaled_dot_product_attention and not torch.is_grad_enabled()
    ),
}
