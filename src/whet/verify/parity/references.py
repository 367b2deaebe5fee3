"""Reference results of operators: from the CPU kernel, in float64 if possible, or from a formula if it has none."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_FLOAT64 = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}
_UNSUPPORTED = (RuntimeError, NotImplementedError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class CompletedCall:
    """The return value of an operator, and its arguments after the call, which it may have changed."""

    returned: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """The expected result of an operator."""

    float64: CompletedCall | None
    """Result in float64, or None if it is unknown."""
    own: CompletedCall | None
    """Result in the original dtypes, which shows the CPU's rounding error, or None if it is unknown."""
    is_formula: bool = False
    """Whether the result comes from a formula in FORMULAS."""


def reference_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ReferenceResult:
    """Compute the reference result on the CPU. The arguments are copied first, so they do not change."""
    formula = FORMULAS.get(func.name())
    if formula is not None:
        returned = _try_call(lambda: formula(*copy_to_float64(args), **copy_to_float64(kwargs)))
        return ReferenceResult(returned and CompletedCall(returned.returned, args, kwargs), None, is_formula=True)
    return ReferenceResult(
        _run(func, copy_to_float64(args), copy_to_float64(kwargs)), _run(func, copy_to_cpu(args), copy_to_cpu(kwargs))
    )


def copy_to_float64(tree: Any) -> Any:
    """Copy all tensors in a pytree to the CPU. Convert floating-point tensors to float64."""
    return tree_map(lambda leaf: _copy(leaf, float64=True), tree)


def copy_to_cpu(tree: Any) -> Any:
    """Copy all tensors in a pytree to the CPU, with their dtypes."""
    return tree_map(lambda leaf: _copy(leaf, float64=False), tree)


def _copy(leaf: Any, *, float64: bool) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    if not isinstance(leaf, Tensor):
        return leaf
    # Copy before converting, because MPS produces wrong results for copies that also convert.
    on_cpu = leaf.detach().cpu()
    on_cpu = on_cpu.clone() if on_cpu is leaf or leaf.device.type == "cpu" else on_cpu
    return on_cpu.to(_FLOAT64.get(on_cpu.dtype, on_cpu.dtype)) if float64 else on_cpu


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompletedCall | None:
    done = _try_call(lambda: func(*args, **kwargs))
    if done is None:
        # An operator without a CPU kernel may have a decomposition into operators that have one.
        from torch._decomp import decomposition_table

        decomposed = decomposition_table.get(func)
        done = decomposed and _try_call(lambda: decomposed(*args, **kwargs))
    return done and CompletedCall(done.returned, args, kwargs)


def _try_call(call: Callable[[], Any]) -> CompletedCall | None:
    try:
        return CompletedCall(call(), (), {})
    except _UNSUPPORTED:
        return None


# --- attention kernels of CUDA ----------------------------------------------------------------------------------------


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, *, is_causal: bool, scale: float | None) -> Tensor:
    scores = q @ k.transpose(-2, -1) * _scale(q, scale)
    if bias is not None:
        scores = scores + bias
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~visible, -torch.inf)
    return torch.softmax(scores, -1)


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _efficient_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,  # noqa: ARG001
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    if dropout_p:
        raise NotImplementedError
    return (_weights(q, k, bias, is_causal=is_causal, scale=scale) @ v,)


def _efficient_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,  # noqa: ARG001
    logsumexp: Tensor,  # noqa: ARG001
    seed: Tensor,  # noqa: ARG001
    offset: Tensor,  # noqa: ARG001
    dropout_p: float,
    grad_input_mask: list[bool],  # noqa: ARG001
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    if dropout_p:
        raise NotImplementedError
    weights = _weights(q, k, bias, is_causal=is_causal, scale=scale)
    grad_weights = grad @ v.transpose(-2, -1)
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True))
    factor = _scale(q, scale)
    return grad_scores @ k * factor, grad_scores.transpose(-2, -1) @ q * factor, weights.transpose(-2, -1) @ grad


# Formulas for CUDA operators that have no CPU kernel. Only the results that a formula returns are compared.
FORMULAS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "aten::_scaled_dot_product_efficient_attention": _efficient_attention,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_attention_backward,
}
