"""Detectors for operators, dtypes, shapes and weights that a device does not support."""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from whet.base.units import format_bytes
from whet.data.batch import MicroBatch
from whet.device.operators import (
    MAX_BUFFER_SHARE,
    MAX_CONV_CHANNELS,
    MAX_DIMENSION_SIZE,
    MAX_DIMENSIONS,
    MAX_ELEMENTS,
    OperatorEntry,
    OperatorStatus,
    operator_status,
    torch_operators,
)
from whet.machine.facts import Machine
from whet.verify.preflight.findings import (
    Detection,
    Detector,
    FunctionCall,
    OperatorCall,
    PreflightFinding,
    SourceLine,
    user_line,
)

# --- operators --------------------------------------------------------------------------------------------------------

SVD = {torch.linalg.svd, torch.svd, torch.Tensor.svd}
_FALLBACK = "mps_fallback=on, which computes it on the CPU at the cost of two copies; or another operator"
_OTHER_OPERATOR = "another operator"
_COMPOSITE = ("CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")


class OperatorDetector(Detector):
    """Reports operators that the backend does not support, according to the operator table of a torch version."""

    def __init__(self, backend: str, operators: dict[str, OperatorEntry] | None = None) -> None:
        self._backend = backend
        self._operators = operators if operators is not None else torch_operators()
        self._statuses: dict[str, OperatorStatus] = {}

    def operator(self, call: OperatorCall) -> Iterable[Detection]:
        if call.phase == "init":
            return
        # The trace runs on the CPU, which has its own operator for fused attention. CUDA uses another operator.
        if self._backend == "CUDA" and "_for_cpu" in call.name:
            return
        if call.func.namespace != "aten":
            if not _is_registered(str(call.func.name()), self._backend):
                yield Detection(
                    "unknown-operator",
                    "warning",
                    f"{call.func.name()} is not an operator of torch: whether {self._backend} has it is unknown",
                    f"a kernel for {self._backend}, or the same in torch's own operators",
                )
            return
        status = self._statuses.get(call.name)
        if status is None:
            status = self._statuses[call.name] = operator_status(call.name, self._operators, backend=self._backend)
        if status.kind == "missing":
            yield Detection(
                "missing-operator",
                "error",
                f"{self._backend} has no operator aten::{status.named.partition('.')[0]}",
                _FALLBACK if self._backend == "MPS" else _OTHER_OPERATOR,
            )
        elif status.kind == "on the CPU":
            yield _cpu_fallback_detection(call.name)
        elif status.kind == "unknown":
            what = f"torch's operator table has no aten::{call.name}"
            yield Detection("unknown-operator", "warning", what, _OTHER_OPERATOR)

    def function(self, call: FunctionCall) -> Iterable[Detection]:
        if self._backend == "MPS" and call.function in SVD and self._operators["linalg_svd"].is_on_cpu:
            yield _cpu_fallback_detection("linalg_svd")


def _cpu_fallback_detection(name: str) -> Detection:
    return Detection(
        "cpu-fall-back",
        "warning",
        f"MPS computes aten::{name} on the CPU: it waits for the GPU and copies there and back",
        "another operator, or --device cpu if most of the time is spent there",
    )


@cache
def _is_registered(name: str, backend: str) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(name, key) for key in (backend, *_COMPOSITE))


# --- dtypes -----------------------------------------------------------------------------------------------------------

FLOAT64_REPLACEMENTS = {torch.float64: "float32", torch.complex128: "complex64"}
_HALF = (torch.float16, torch.bfloat16)


def float64_detection(name: str, dtype: torch.dtype) -> Detection:
    replacement = FLOAT64_REPLACEMENTS[dtype]
    return Detection(
        "float64",
        "error",
        f"{name} is {_short(dtype)}, which MPS does not have",
        f"dtype=torch.{replacement}, or .to(torch.{replacement}); NumPy's default is float64",
    )


def is_unsupported(dtype: torch.dtype) -> bool:
    """Return whether the dtype is a float with 8 bits or fewer, which Metal does not support."""
    return "float8" in str(dtype) or "float4" in str(dtype)


class DtypeDetector(Detector):
    """Reports operators that create tensors of an unsupported dtype, unless an input already has that dtype."""

    def __init__(self) -> None:
        self._seen: set[torch.dtype] = set()

    def operator(self, call: OperatorCall) -> Iterable[Detection]:
        if call.phase == "init":
            return
        for dtype in {tensor.dtype for tensor in call.outputs}:
            if not (dtype in FLOAT64_REPLACEMENTS or is_unsupported(dtype)):
                continue
            if any(tensor.dtype == dtype for tensor in call.inputs):
                continue
            # A Python number wrapped as a tensor stays on the host.
            if all(tensor.dim() == 0 for tensor in call.outputs) and not call.inputs:
                continue
            # A gradient has the dtype of its tensor, which has already been reported in the forward pass.
            if call.is_backward and dtype in self._seen:
                continue
            self._seen.add(dtype)
            if dtype in FLOAT64_REPLACEMENTS:
                yield float64_detection("a tensor created here", dtype)
            else:
                yield Detection("unsupported-dtype", "error", f"MPS has no {_short(dtype)}", "float16 or bfloat16")
        if call.base == "convolution" and _is_half_transposed_3d(call):
            yield Detection(
                "unsupported-dtype", "error", "MPS has no transposed conv3d in half precision", "float32 for it"
            )


def _is_half_transposed_3d(call: OperatorCall) -> bool:
    weight = call.args[1]
    return isinstance(weight, Tensor) and bool(call.args[6]) and weight.dim() == 5 and weight.dtype in _HALF


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- shapes -----------------------------------------------------------------------------------------------------------

_POOLS = ("_adaptive_avg_pool2d", "adaptive_avg_pool2d")


def buffer_limit(machine: Machine | None, device: str) -> int | None:
    """Return the maximum size of a tensor in bytes, or None if the machine's memory is unknown."""
    if machine is None:
        return None
    if device == "cpu":
        return machine.memory_bytes
    accelerator = machine.accelerator(device)
    if accelerator is None or accelerator.usable_bytes is None:
        return None
    return int(accelerator.usable_bytes * MAX_BUFFER_SHARE) if device == "mps" else accelerator.usable_bytes


def buffer_detection(num_bytes: int, limit: int, device: str, *, try_: str) -> Detection:
    what = f"a tensor of {format_bytes(num_bytes)}; the limit for one tensor is {format_bytes(limit)}"
    if device == "mps":
        what += " (Metal's maxBufferLength, assumed to be three quarters of the recommended memory)"
    return Detection("buffer-too-large", "error", what, try_)


class BufferDetector(Detector):
    """Reports tensors that exceed the maximum buffer size of the device."""

    def __init__(self, limit: int, device: str) -> None:
        self._limit = limit
        self._device = device

    def operator(self, call: OperatorCall) -> Iterable[Detection]:
        if call.phase == "init":
            return
        large = [tensor for tensor in call.outputs if tensor.numel() * tensor.element_size() > self._limit]
        # A view takes no memory, regardless of its size.
        new = {id(tensor) for tensor in call.new_outputs} if large else set()
        for tensor in large:
            num_bytes = tensor.untyped_storage().nbytes()
            if id(tensor) in new and num_bytes > self._limit:
                try_ = "a smaller micro-batch, shorter samples, or computing it in chunks"
                yield buffer_detection(num_bytes, self._limit, self._device, try_=try_)


class ShapeDetector(Detector):
    """Reports shapes that MPS operators reject or compute wrongly."""

    def operator(self, call: OperatorCall) -> Iterable[Detection]:
        if call.phase == "init":
            return
        was_reported = any(tensor.dim() > MAX_DIMENSIONS for tensor in call.inputs)
        for tensor in call.outputs:
            if not was_reported:
                yield from dimension_detections(tensor, "a tensor")
        for tensor in call.outputs:
            if not any(given.shape == tensor.shape for given in call.inputs):
                yield from element_detections(tensor, "a tensor")
        if call.base in _POOLS and call.has_uneven_sizes:
            given, pooled = tuple(call.inputs[0].shape[-2:]), tuple(call.outputs[0].shape[-2:])
            yield Detection(
                "adaptive-pool",
                "error",
                f"adaptive_avg_pool2d from {given} to {pooled}: on MPS the sizes must be divisible (pytorch#96056)",
                "sizes that are divisible, or interpolate() first",
            )
        channels = call.outputs[0].shape[1] if call.base == "convolution" and call.outputs[0].dim() > 1 else 0
        if channels > MAX_CONV_CHANNELS:
            yield Detection(
                "too-many-channels",
                "error",
                f"a convolution with {channels:,} output channels; MPS has at most {MAX_CONV_CHANNELS:,}",
                "fewer channels, or the convolution in chunks",
            )


def dimension_detections(tensor: Tensor, name: str) -> Iterable[Detection]:
    if tensor.dim() > MAX_DIMENSIONS:
        yield Detection(
            "too-many-dimensions",
            "error",
            f"{name} of {tensor.dim()} dimensions; MPS has at most {MAX_DIMENSIONS}",
            "reshape or flatten some of them first",
        )


def element_detections(tensor: Tensor, name: str) -> Iterable[Detection]:
    longest = max(tensor.shape, default=0)
    if longest > MAX_DIMENSION_SIZE:
        yield Detection(
            "too-many-elements",
            "error",
            f"{name} with {longest:,} elements in one dimension; MPS fails or is wrong from 2**31 on",
            "smaller chunks",
        )
    elif tensor.numel() > MAX_ELEMENTS:
        yield Detection(
            "too-many-elements",
            "warning",
            f"{name} of {tensor.numel():,} elements; MPS multiplies at most 2**32",
            "smaller chunks, or a smaller micro-batch",
        )


# --- weights, inputs and optimizer state ------------------------------------------------------------------------------

TensorKey = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class AllocationSites(Detector):
    """Records the line that created each tensor while the model was constructed. Reports nothing."""

    def __init__(self) -> None:
        self._lines: dict[TensorKey, SourceLine | None] = {}
        self._storages: list[Any] = []
        """References to the storages. If one were freed, a new tensor could reuse its address and get its line."""

    def operator(self, call: OperatorCall) -> Iterable[Detection]:
        if call.phase == "init":
            for tensor in call.outputs:
                key = _tensor_key(tensor)
                if key not in self._lines:
                    self._lines[key] = user_line()
                    self._storages.append(tensor.untyped_storage())
        return ()

    def line_of(self, tensor: Tensor) -> SourceLine | None:
        return self._lines.get(_tensor_key(tensor))


def _tensor_key(tensor: Tensor) -> TensorKey:
    return tensor.untyped_storage()._cdata, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def check_model(
    model: nn.Module, sites: AllocationSites, *, device: str, limit: int | None
) -> Iterator[PreflightFinding]:
    """Yield findings about the weights and buffers of a model."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        for detection in _tensor_detections(tensor, name, device=device, limit=limit):
            yield detection.as_finding(sites.line_of(tensor), during="the construction of the model")
    yield from _mixed_dtype_findings(model, sites)


def check_inputs(micro: MicroBatch) -> Iterator[PreflightFinding]:
    """Yield findings about inputs with dtypes that MPS does not support."""
    for name, value in micro.fields.items():
        tensor = value if isinstance(value, Tensor) else value.values
        if isinstance(tensor, Tensor) and tensor.dtype in FLOAT64_REPLACEMENTS:
            yield float64_detection(f"the input {name}", tensor.dtype).as_finding(None, during="the data")


def _tensor_detections(tensor: Tensor, name: str, *, device: str, limit: int | None) -> Iterator[Detection]:
    num_bytes = tensor.numel() * tensor.element_size()
    if limit is not None and num_bytes > limit:
        yield buffer_detection(num_bytes, limit, device, try_=f"{name} in chunks, or smaller")
    if device != "mps":
        return
    if tensor.dtype in FLOAT64_REPLACEMENTS:
        yield float64_detection(name, tensor.dtype)
    elif is_unsupported(tensor.dtype):
        yield Detection("unsupported-dtype", "error", f"{name} is {tensor.dtype}, which MPS does not have", "float16")
    yield from dimension_detections(tensor, name)
    yield from element_detections(tensor, name)
    if isinstance(tensor, nn.Parameter) and not tensor.is_contiguous():
        yield Detection(
            "strided-weight",
            "warning",
            f"the weight {name} is not contiguous: conv2d gives wrong results with such weights (pytorch#192212)",
            ".contiguous() here; whet does it before the first step, plain PyTorch does not",
        )


def _mixed_dtype_findings(model: nn.Module, sites: AllocationSites) -> Iterator[PreflightFinding]:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()]
    counts = Counter(parameter.dtype for _, parameter in trained)
    if len(counts) < 2:
        return
    dtypes = ", ".join(f"{count} in {_short(dtype)}" for dtype, count in counts.most_common())
    rare = counts.most_common()[-1][0]
    name, parameter = next((name, p) for name, p in trained if p.dtype == rare)
    detection = Detection(
        "mixed-dtypes",
        "warning",
        f"weights of more than one dtype: {dtypes}, such as {name}; the optimizer state is mixed too",
        "weights in float32; precision=bf16 computes in half precision without changing them",
    )
    yield detection.as_finding(sites.line_of(parameter), during="the construction of the model")


class FusedUpdateDetector(Detector):
    """Reports fused optimizer updates in which the weight, gradient and state have different dtypes."""

    def operator(self, call: OperatorCall) -> Iterable[Detection]:
        if call.phase != "updating" or not call.base.startswith("_fused_"):
            return
        lists = [value for value in call.args[:4] if isinstance(value, list | tuple)]
        for group in zip(*(tensors for tensors in lists if tensors), strict=False):
            dtypes = {tensor.dtype for tensor in group if isinstance(tensor, Tensor) and tensor.dim() > 0}
            if len(dtypes) > 1:
                names = " and ".join(sorted(_short(dtype) for dtype in dtypes))
                yield Detection(
                    "mixed-dtypes",
                    "error",
                    f"a fused update of a weight, its gradient and its state in {names}",
                    "a model whose weights keep their dtype during training",
                )
                return
