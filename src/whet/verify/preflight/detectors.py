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
    ALWAYS_ON_CPU,
    MAX_BUFFER_SHARE,
    MAX_CONV_CHANNELS,
    MAX_DIMENSION_SIZE,
    MAX_DIMENSIONS,
    MAX_ELEMENTS,
    OperatorStatus,
    operator_status,
    torch_operators,
)
from whet.machine.facts import Machine
from whet.verify.preflight.findings import (
    CheckFinding,
    Detection,
    Detector,
    OperatorCall,
    SourceLine,
    locate_line,
    user_line,
)

FLOAT64_REPLACEMENTS = {torch.float64: "float32", torch.complex128: "complex64"}
_HALF = (torch.float16, torch.bfloat16)


def float64_detection(name: str, dtype: torch.dtype) -> Detection:
    return Detection(
        "float64",
        "error",
        f"{name} is {_short(dtype)}, which MPS does not have",
        f"dtype=torch.{FLOAT64_REPLACEMENTS[dtype]}, or .to(torch.{FLOAT64_REPLACEMENTS[dtype]}); numpy's numbers are float64 unless told",
    )


def is_unsupported(dtype: torch.dtype) -> bool:
    """Formats of 8 bits for floating point: Metal has none."""
    return "float8" in str(dtype) or "float4" in str(dtype)


class DtypeDetector(Detector):
    """The first operator that makes a number of a format that MPS lacks; those that only go on with it are not told."""

    def __init__(self) -> None:
        self._seen: set[torch.dtype] = set()

    def operator(self, call: OperatorCall) -> Iterable[Detection]:
        if call.phase == "making":
            return
        for dtype in {tensor.dtype for tensor in call.outputs}:
            if not (dtype in FLOAT64_REPLACEMENTS or is_unsupported(dtype)) or any(
                t.dtype == dtype for t in call.inputs
            ):
                continue
            # A number of Python may have any width: it is the host's.
            if all(tensor.dim() == 0 for tensor in call.outputs) and not call.inputs:
                continue
            # Gradients have the format of what they belong to, and that was told.
            if call.is_backward and dtype in self._seen:
                continue
            self._seen.add(dtype)
            if dtype in FLOAT64_REPLACEMENTS:
                yield float64_detection("a tensor that is made here", dtype)
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


_POOLS = ("_adaptive_avg_pool2d", "adaptive_avg_pool2d")


def buffer_limit(machine: Machine | None, device: str) -> int | None:
    """The most bytes one tensor may have, where the machine says enough to tell."""
    if machine is None:
        return None
    if device == "cpu":
        return machine.memory_bytes
    found = machine.accelerator(device)
    if found is None or found.usable_bytes is None:
        return None
    return int(found.usable_bytes * MAX_BUFFER_SHARE) if device == "mps" else found.usable_bytes


def buffer_detection(num_bytes: int, limit: int, device: str, *, cure: str) -> Detection:
    told = f"a tensor of {format_bytes(num_bytes)}, and one may have {format_bytes(limit)}"
    if device == "mps":
        told += " (Metal's maxBufferLength, taken as three quarters of the recommended memory; no Mac was asked)"
    return Detection("buffer-too-large", "error", told, cure)


class BufferDetector(Detector):
    """One tensor must fit into one buffer, on any device."""

    def __init__(self, limit: int, device: str) -> None:
        self._limit = limit
        self._device = device

    def operator(self, call: OperatorCall) -> Iterable[Detection]:
        if call.phase == "making":
            return
        large = [tensor for tensor in call.outputs if tensor.numel() * tensor.element_size() > self._limit]
        # A view of what is there takes no memory, however large it looks.
        fresh = {id(tensor) for tensor in call.new_outputs} if large else set()
        for tensor in large:
            num_bytes = tensor.untyped_storage().nbytes()
            if id(tensor) in fresh and num_bytes > self._limit:
                cure = "a smaller micro-batch, shorter samples, or computing it in pieces"
                yield buffer_detection(num_bytes, self._limit, self._device, cure=cure)


class ShapeDetector(Detector):
    """Shapes that MPS's operators refuse or compute wrongly."""

    def operator(self, call: OperatorCall) -> Iterable[Detection]:
        if call.phase == "making":
            return
        deep = any(tensor.dim() > MAX_DIMENSIONS for tensor in call.inputs)
        for tensor in call.outputs:
            if not deep:
                yield from dimension_detections(tensor, "a tensor")
        for tensor in call.outputs:
            if not any(given.shape == tensor.shape for given in call.inputs):
                yield from element_detections(tensor, "a tensor")
        if call.base in _POOLS:
            yield from _uneven_pool(call)
        if call.base == "convolution" and call.outputs[0].dim() > 1 and call.outputs[0].shape[1] > MAX_CONV_CHANNELS:
            yield Detection(
                "too-many-channels",
                "error",
                f"a convolution with {call.outputs[0].shape[1]:,} output channels; MPS has at most {MAX_CONV_CHANNELS:,}",
                "fewer channels, or the convolution in pieces",
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
            "smaller pieces",
        )
    elif tensor.numel() > MAX_ELEMENTS:
        yield Detection(
            "too-many-elements",
            "warning",
            f"{name} of {tensor.numel():,} elements; MPS has products of at most 2**32",
            "smaller pieces, or a smaller micro-batch",
        )


def _uneven_pool(call: OperatorCall) -> Iterable[Detection]:
    given, wanted = tuple(call.inputs[0].shape[-2:]), tuple(call.outputs[0].shape[-2:])
    if any(max(a, b) % max(min(a, b), 1) for a, b in zip(given, wanted, strict=True)):
        yield Detection(
            "adaptive-pool",
            "error",
            f"adaptive_avg_pool2d from {given} to {wanted}: on MPS the sizes must divide (pytorch#96056)",
            "sizes that divide, or interpolate() first",
        )


_SVD = {torch.linalg.svd, torch.svd, torch.Tensor.svd}
_FALLBACK = "mps_fallback=on, which computes it on the CPU and costs two copies; or another operator there"
_OTHER_OPERATOR = "another operator there"
_COMPOSITE = ("CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")


class OperatorDetector(Detector):
    """Looks every operator up in the list of the installed torch."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._statuses: dict[str, OperatorStatus] = {}

    def operator(self, call: OperatorCall) -> Iterable[Detection]:
        if call.phase == "making":
            return
        # CUDA has a fused attention of its own, where the trace meets the CPU's.
        if self._backend == "CUDA" and "_for_cpu" in call.name:
            return
        if call.func.namespace != "aten":
            if not _is_registered(str(call.func.name()), self._backend):
                yield Detection(
                    "unknown-operator",
                    "warning",
                    f"{call.func.name()} is no operator of torch; nobody knows whether {self._backend} has it",
                    f"a kernel for {self._backend}, or a form of it in operators of torch",
                )
            return
        status = self._statuses.get(call.name)
        if status is None:
            status = self._statuses[call.name] = operator_status(call.name, torch_operators(), backend=self._backend)
        if status.kind == "missing":
            cure = _FALLBACK if self._backend == "MPS" else _OTHER_OPERATOR
            yield Detection(
                "missing-operator",
                "error",
                f"{self._backend} has no operator aten::{status.named.partition('.')[0]}",
                cure,
            )
        elif status.kind == "on the CPU":
            yield _cpu_fallback_detection(call.name)
        elif status.kind == "unknown":
            yield Detection(
                "unknown-operator", "warning", f"torch's list has no operator aten::{call.name}", _OTHER_OPERATOR
            )

    def function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Detection]:  # noqa: ARG002
        if self._backend == "MPS" and "linalg_svd" in ALWAYS_ON_CPU and function in _SVD:
            yield _cpu_fallback_detection("linalg_svd")


def _cpu_fallback_detection(name: str) -> Detection:
    return Detection(
        "cpu-fall-back",
        "warning",
        f"MPS computes aten::{name} on the CPU: it waits for the GPU, copies there and back",
        "another operator there, or --device cpu if much of the time goes into it",
    )


@cache
def _is_registered(name: str, backend: str) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(name, key) for key in (backend, *_COMPOSITE))


TensorKey = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class AllocationSites(Detector):
    """The line that first gave a piece of memory the form in which the model has it."""

    def __init__(self) -> None:
        self._lines: dict[TensorKey, SourceLine | None] = {}
        self._kept: list[Any] = []
        """Memory that was given back could be another tensor's later."""

    def operator(self, call: OperatorCall) -> Iterable[Detection]:
        if call.phase == "making":
            for tensor in call.outputs:
                form = _tensor_key(tensor)
                if form not in self._lines:
                    self._lines[form] = user_line()
                    self._kept.append(tensor.untyped_storage())
        return ()

    def line_of(self, tensor: Tensor) -> SourceLine | None:
        return self._lines.get(_tensor_key(tensor))

    def forget(self) -> None:
        self._lines, self._kept = {}, []


def _tensor_key(tensor: Tensor) -> TensorKey:
    return tensor.untyped_storage()._cdata, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def check_model(model: nn.Module, born: AllocationSites, *, device: str, limit: int | None) -> Iterator[CheckFinding]:
    """What is wrong before anything is computed."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        for seen in _tensor_detections(tensor, name, device=device, limit=limit):
            line = born.line_of(tensor)
            yield _finding(seen, line, during="the making of the model")
    yield from _mixed_dtype_findings(model, born)


def check_inputs(micro: MicroBatch) -> Iterator[CheckFinding]:
    """Samples in a format that MPS does not have."""
    for name, value in micro.fields.items():
        tensor = value if isinstance(value, Tensor) else value.values
        if isinstance(tensor, Tensor) and tensor.dtype in FLOAT64_REPLACEMENTS:
            yield _finding(float64_detection(f"the input {name}", tensor.dtype), None, during="the data")


def _tensor_detections(tensor: Tensor, name: str, *, device: str, limit: int | None) -> Iterator[Detection]:
    num_bytes = tensor.numel() * tensor.element_size()
    if limit is not None and num_bytes > limit:
        yield buffer_detection(num_bytes, limit, device, cure=f"{name} in pieces, or smaller")
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


def _mixed_dtype_findings(model: nn.Module, born: AllocationSites) -> Iterator[CheckFinding]:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()]
    counts = Counter(parameter.dtype for _, parameter in trained)
    if len(counts) < 2:
        return
    told = ", ".join(f"{count} in {str(dtype).removeprefix('torch.')}" for dtype, count in counts.most_common())
    rare = counts.most_common()[-1][0]
    name, parameter = next((name, p) for name, p in trained if p.dtype == rare)
    seen = Detection(
        "mixed-dtypes",
        "warning",
        f"weights of more than one number format: {told}, such as {name}; what the optimizer keeps is mixed too",
        "weights in float32; precision=bf16 computes in half precision without changing them",
    )
    yield _finding(seen, born.line_of(parameter), during="the making of the model")


def _finding(seen: Detection, line: SourceLine | None, *, during: str) -> CheckFinding:
    return CheckFinding(
        id=seen.id,
        severity=seen.severity,
        what=seen.what,
        try_=seen.try_,
        place=locate_line(line) if line else None,
        during="" if line else during,
    )


class FusedUpdateDetector(Detector):
    """Fused updates take weights, gradients and state of one number format."""

    def operator(self, call: OperatorCall) -> Iterable[Detection]:
        if call.phase != "updating" or not call.base.startswith("_fused_"):
            return
        lists = [value for value in call.args[:4] if isinstance(value, list | tuple)]
        for same in zip(*(tensors for tensors in lists if tensors), strict=False):
            dtypes = {tensor.dtype for tensor in same if isinstance(tensor, Tensor) and tensor.dim() > 0}
            if len(dtypes) > 1:
                told = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
                yield Detection(
                    "mixed-dtypes",
                    "error",
                    f"a fused update of a weight, its gradient and its state in {told}",
                    "a model whose weights keep their number format while it trains",
                )
                return
