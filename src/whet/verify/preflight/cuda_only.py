"""Detect code that works only with CUDA, and let the trace continue as if on the device of the check."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from whet.verify.preflight.findings import Detection, PreflightFinding, SourceLine, user_line

_NEEDS_CUDA = "ends with an error without CUDA"
_TRY_DEVICE = "the device of an existing tensor, such as x.device; whet moves the model and its inputs"


class CudaOnlyCode(TorchFunctionMode):
    """A function mode that reports CUDA-only code with its line, and prevents that code from moving tensors to CUDA.

    On a Mac, `.cuda()` and `device="cuda"` raise an error. `torch.autocast("cuda")` and a `GradScaler` for CUDA are
    only disabled, and training continues in float32.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self._detections: dict[tuple[Detection, SourceLine | None], None] = {}
        self._patches = contextlib.ExitStack()

    def findings(self) -> list[PreflightFinding]:
        """Return the findings, each once per line."""
        return [detection.as_finding(line, during="the step") for detection, line in self._detections]

    def __enter__(self) -> "CudaOnlyCode":
        for patch in self._make_patches():
            self._patches.enter_context(patch)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda and self._is_called_by_user():
            self._report(f".cuda() {_NEEDS_CUDA}", _TRY_DEVICE)
            return args[0]
        if any(map(_is_cuda, (*args, *kwargs.values()))) and self._is_called_by_user():
            self._report(f"a tensor on the device cuda {_NEEDS_CUDA}", _TRY_DEVICE)
            args = tuple("cpu" if _is_cuda(value) else value for value in args)
            kwargs = {name: "cpu" if _is_cuda(value) else value for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _is_called_by_user(self) -> bool:
        # whet and torch also query the state of CUDA.
        return user_line() is not None

    def _report(self, what: str, try_: str, *, is_error: bool = True) -> None:
        detection = Detection("cuda-only", "error" if is_error else "warning", what, try_)
        self._detections[detection, user_line()] = None

    def _make_patches(self) -> Iterator[contextlib.AbstractContextManager[None]]:
        yield _patched(torch.autocast, "__init__", self._report_autocast)
        yield _patched(torch.amp.GradScaler, "__init__", self._report_scaler)
        yield _patched(torch.nn.Module, "cuda", self._keep_module)
        yield _patched(torch.nn.Module, "to", self._keep_module)
        for name in ("synchronize", "set_device"):
            # This only patches functions of the backend, so that the trace does not call them.
            yield _patched(torch.cuda, name, functools.partial(self._skip_call, name))  # noqa: TID251

    def _report_autocast(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        device_type = args[1] if len(args) > 1 else kwargs.get("device_type")
        is_enabled = args[3] if len(args) > 3 else kwargs.get("enabled", True)
        if device_type == "cuda" and is_enabled:
            self._report(
                f'torch.autocast("cuda") has no effect on {self._device}: the operators run in float32',
                f"precision=bf16 instead, or torch.autocast({self._device!r}, ...)",
                is_error=False,
            )
        original(*args, **kwargs)

    def _report_scaler(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        device_type = args[1] if len(args) > 1 else kwargs.get("device", "cuda")
        if device_type == "cuda":
            self._report(
                f"a GradScaler for cuda is disabled on {self._device}: nothing scales the loss",
                "precision=fp16 instead, which scales the loss where that is needed",
                is_error=False,
            )
        original(*args, **kwargs)

    def _keep_module(self, original: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Replace Module.cuda and Module.to for CUDA, which would swap each fake tensor with itself and fail."""
        others = [value for value in args if not _is_cuda(value)]
        named = {name: value for name, value in kwargs.items() if not _is_cuda(value)}
        is_cuda = original.__name__ == "cuda"
        if not is_cuda and len(others) == len(args) and len(named) == len(kwargs):
            return original(module, *args, **kwargs)
        self._report(f"a model on the device cuda {_NEEDS_CUDA}", "nothing: whet moves the model to the device")
        return module if is_cuda or not (others or named) else original(module, *others, **named)

    def _skip_call(self, name: str, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        try_ = "torch.accelerator.synchronize()" if name == "synchronize" else "--device, or nothing: there is one GPU"
        self._report(f"torch.cuda.{name}() {_NEEDS_CUDA}", try_)


@contextlib.contextmanager
def _patched(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a function in the context. The replacement gets the original function and the arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"
