"""How does attention become causal without the flag is_causal? By a mask that says so, added to the scores.

Devices have kernels of their own for the flag, and one of them has let places see what comes after them
(pytorch#195910: MPS, half precision). A mask takes the other path and means the same.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_NAME = "scaled_dot_product_attention"


@contextmanager
def explicit_masks() -> Iterator[None]:
    """While entered, attention that is asked for with is_causal=True gets a mask instead, in every thread.

    The function is replaced wherever it goes by its own name, also in modules that imported it.
    """
    original = _attention_now()

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Tensor:
        if is_causal and attn_mask is None:
            attn_mask, is_causal = causal_mask(query, key), False
        return original(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, **more)

    with _replaced(original, attention):
        yield


@contextmanager
def attention_calls() -> Iterator[list[None]]:
    """While entered, every call of torch's attention adds to the list."""
    original, calls = _attention_now(), list[None]()

    def attention(*given: Any, **named: Any) -> Any:
        calls.append(None)
        return original(*given, **named)

    with _replaced(original, attention):
        yield calls


@contextmanager
def _replaced(original: Any, attention: Any) -> Iterator[None]:
    holders = [module for module in list(sys.modules.values()) if _holds(module, original)]
    for module in holders:
        setattr(module, _NAME, attention)
    try:
        yield
    finally:
        for module in holders:
            setattr(module, _NAME, original)


def _attention_now() -> Any:
    return getattr(torch.nn.functional, _NAME)


def causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """Zero where a place may look, minus infinity where it may not; aligned as is_causal is, at the first place."""
    shape = query.shape[-2], key.shape[-2]
    may_look = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    return torch.zeros(shape, dtype=query.dtype, device=query.device).masked_fill(~may_look, -torch.inf)


def _holds(module: object, function: object) -> bool:
    return isinstance(module, ModuleType) and vars(module).get(_NAME) is function
