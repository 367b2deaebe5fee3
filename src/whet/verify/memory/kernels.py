"""Substitutes for kernels that use a different amount of memory on a GPU than on the CPU.

Steps for all devices are traced with CPU tensors, because fake tensors of a device that torch was not built for abort
the process in the backward pass. Most operators use the same memory on all devices. This module replaces the others
with substitutes that only allocate. `device/tracing.py` handles the branches for which torch has a setting.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

# Number of vectors of the hidden size that cuDNN saves per layer and time step, besides the input of the next layer.
#
# Derived from two sizes in pytorch/pytorch#2895: 736,000,000 bytes for an LSTM with 4 layers and 864,000,000 for a GRU,
# both with hidden size 320 and 25,000 steps. The workspace there was only slightly larger than the weights. We assume
# that MPS needs the same.
_SAVED_VECTORS = {"lstm": 5, "gru": 6}


class FusedRnn(Function):
    """An LSTM or GRU as in cuDNN and MPS: one kernel for all time steps, and one buffer saved for the backward pass."""

    @staticmethod
    def lstm(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Stand in for torch.lstm, with padded or packed inputs."""
        output, *states = _run_rnn("lstm", args)
        return output, states[0], states[1]

    @staticmethod
    def gru(*args: Any) -> tuple[Tensor, Tensor]:
        """Stand in for torch.gru, with padded or packed inputs."""
        output, *states = _run_rnn("gru", args)
        return output, states[0]

    @staticmethod
    def forward(ctx: Any, kind: str, directions: int, layers: int, data: Tensor, *rest: Tensor) -> Any:
        states, weights = rest[: 2 if kind == "lstm" else 1], rest[2 if kind == "lstm" else 1 :]
        hidden = weights[1].shape[1]
        num_steps = data.numel() // data.shape[-1]
        output = data.new_empty((*data.shape[:-1], hidden * directions))
        reserve = data.new_empty(num_steps * directions * hidden * (_SAVED_VECTORS[kind] * layers + layers - 1))
        ctx.workspace = sum(weight.numel() for weight in weights)
        data.new_empty(ctx.workspace)
        ctx.save_for_backward(data, output, reserve, *states, *weights)
        return output, *(state.new_empty(state.shape) for state in states)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        data, _, _, *rest = ctx.saved_tensors
        workspace = data.new_empty(ctx.workspace)
        grads = tuple(torch.empty_like(tensor) for tensor in (data, *rest))
        del workspace, gradients
        return None, None, None, *grads


def _run_rnn(kind: str, args: tuple[Any, ...]) -> Any:
    """Run `FusedRnn` with the arguments of torch.lstm or torch.gru, which differ for padded and packed inputs."""
    is_packed = isinstance(args[1], Tensor) and not isinstance(args[3], bool)
    if is_packed:
        data, _, states, weights, _, layers, _, _, is_bidirectional = args
    else:
        data, states, weights, _, layers, _, _, is_bidirectional, _ = args
    states = states if isinstance(states, tuple | list) else (states,)
    tensors = (data, *states, *weights)
    if torch.is_autocast_enabled("cpu"):
        tensors = tuple(tensor.to(torch.get_autocast_dtype("cpu")) for tensor in tensors)
    return FusedRnn.apply(kind, 2 if is_bidirectional else 1, layers, *tensors)


class FusedRmsNorm(Function):
    """RMSNorm as a single kernel that saves its input and one number per row."""

    @staticmethod
    def call(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:  # noqa: A002, ARG004
        """Stand in for torch.rms_norm and functional.rms_norm."""
        return FusedRmsNorm.apply(input, tuple(normalized_shape), weight)

    @staticmethod
    def forward(ctx: Any, data: Tensor, shape: tuple[int, ...], weight: Tensor | None) -> Tensor:
        rows = data.shape[: data.dim() - len(shape)]
        ctx.save_for_backward(data, data.new_empty(rows, dtype=torch.float32), *([] if weight is None else [weight]))
        return torch.empty_like(data)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # noqa: ARG004
        data, _, *weight = ctx.saved_tensors
        return torch.empty_like(data), None, torch.empty_like(weight[0]) if weight else None


_aten = torch.ops.aten
# The original functions, which the substitutes call.
_run_backward = torch.autograd.graph._engine_run_backward
_attention = functional.scaled_dot_product_attention
_dropout = functional.dropout
_cross_entropy = functional.cross_entropy
# Functions that autocast runs in float32 on CUDA and MPS, but not on the CPU. Only functions that save tensors are
# listed, because the others do not affect the peak.
_FLOAT32_UNDER_AUTOCAST = (
    functional.layer_norm, torch.layer_norm, functional.group_norm, torch.group_norm,
    functional.softmax, torch.softmax, Tensor.softmax, functional.log_softmax, torch.log_softmax, Tensor.log_softmax,
    functional.nll_loss, functional.mse_loss,
    torch.sum, Tensor.sum, torch.pow, Tensor.pow, torch.exp, Tensor.exp, torch.log, Tensor.log,
    torch.cumsum, Tensor.cumsum, torch.norm, Tensor.norm,
)  # fmt: skip


class DeviceKernels(TorchFunctionMode):
    """Replaces torch functions with substitutes for the kernels that they would use on a device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        handlers: dict[Any, Callable[..., Any] | None] = {}
        if device in ("cuda", "mps"):
            handlers[torch.lstm] = FusedRnn.lstm
            handlers[torch.gru] = FusedRnn.gru
            handlers[functional.rms_norm] = handlers[torch.rms_norm] = FusedRmsNorm.call
            handlers |= dict.fromkeys(_FLOAT32_UNDER_AUTOCAST)
            handlers[functional.cross_entropy] = _gpu_cross_entropy
        if device == "cuda":
            handlers[functional.dropout] = handlers[torch.dropout] = _cuda_dropout
            handlers[functional.scaled_dot_product_attention] = _cuda_attention
        self._handlers = handlers
        # multi_head_attention_forward is a Python function. A mode that handles it does not get the calls inside it.
        self._inside_attention = {
            name: handler
            for name in ("dropout", "scaled_dot_product_attention")
            if (handler := handlers.get(getattr(functional, name))) is not None
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward and self._inside_attention:
            with _replaced(functional, self._inside_attention):
                return func(*args, **kwargs)
        if func in (Tensor.backward, torch.autograd.backward):
            # Checkpointed blocks are recomputed in the backward pass, and need this mode too.
            with _replaced(torch.autograd, {"_engine_run_backward": self._entered(_run_backward)}):
                return func(*args, **kwargs)
        if func not in self._handlers:
            return func(*args, **kwargs)
        handler = self._handlers[func]
        if handler is not None:
            return handler(*args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_as_float32, (args, kwargs))
        return func(*args, **kwargs)

    def _entered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return call


@contextmanager
def autocast(precision: str) -> Iterator[None]:
    """Enable CPU autocast if the precision is bf16 or fp16. Other precisions have no effect."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    if half is None:
        yield
        return
    with torch.autocast("cpu", dtype=half):
        yield


@contextmanager
def _replaced(module: ModuleType, names: Mapping[str, Any]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def _as_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) else value


def _gpu_cross_entropy(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
    """Compute cross_entropy like a GPU under autocast: log_softmax in the dtype of the logits, nll_loss in float32.

    LossNLL.cpp passes the dtype explicitly, so autocast does not change it. A trace on an H200 with torch 2.11 confirms
    this.
    """
    if not torch.is_autocast_enabled("cpu"):
        return _cross_entropy(input, target, *args, **kwargs)
    if target.is_floating_point() or len(args) > 5 or kwargs.get("label_smoothing"):
        return _cross_entropy(input.float(), target, *args, **kwargs)
    with torch.autocast("cpu", enabled=False):
        scores = functional.log_softmax(input, dim=min(1, input.dim() - 1))
        kwargs.pop("label_smoothing", None)
        return functional.nll_loss(scores.float(), target, *args, **kwargs)


def _cuda_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
    """Compute dropout like CUDA, which saves a mask with one byte per element.

    The CPU and MPS save a mask with the dtype of the input.
    """
    if not training or p == 0 or inplace:
        return _dropout(input, p, training, inplace)
    dropped, _ = torch.native_dropout(input, p, True)
    return dropped


def _cuda_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention like CUDA: flash attention in half precision without a mask, else the memory-efficient kernel.

    Neither kernel stores the attention matrix.
    """
    if query.dim() != 4 or enable_gqa or not query.requires_grad:
        options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        return _attention(query, key, value, attn_mask=attn_mask, enable_gqa=enable_gqa, **options)
    if torch.is_autocast_enabled("cpu"):
        half = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(half), key.to(half), value.to(half)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
    if attn_mask is not None:
        shape = (*query.shape[:3], key.shape[2])
        attn_mask = attn_mask.to(query.dtype).expand(shape)
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        flash = _aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    efficient = _aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
