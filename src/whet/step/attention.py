"""Replace torch's attention function, to give it explicit causal masks or to count its calls."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_ATTENTION_NAME = "scaled_dot_product_attention"


@contextmanager
def use_explicit_masks() -> Iterator[None]:
    """Use explicit masks instead of is_causal=True in attention, in all threads.

    Devices have separate kernels for is_causal. The MPS kernel attends to later positions in half precision
    (pytorch#195910). The attention function is replaced in every module that imported it by name.
    """
    original = _current_attention()
    with _replaced(original, _explicit(original)):
        yield


@cache
def _explicit(original: Any) -> Any:
    """Return an attention function with explicit masks.

    It is the same one each time: torch.compile compiles a model again for another function.
    """

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        if is_causal and attn_mask is None:
            attn_mask, is_causal = causal_mask(query, key), False
        return original(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, **options)

    return attention


@contextmanager
def count_attention_calls() -> Iterator[list[None]]:
    """Yield a list to which every call of torch's attention function appends an element."""
    original, calls = _current_attention(), list[None]()

    def attention(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(*args, **kwargs)

    with _replaced(original, attention):
        yield calls


@contextmanager
def _replaced(original: Any, attention: Any) -> Iterator[None]:
    modules = _modules_with(original)
    for module in modules:
        setattr(module, _ATTENTION_NAME, attention)
    try:
        yield
    finally:
        # Modules that were imported in the meantime have the replacement too.
        for module in (*modules, *_modules_with(attention)):
            setattr(module, _ATTENTION_NAME, original)


def _current_attention() -> Any:
    return getattr(torch.nn.functional, _ATTENTION_NAME)


def _modules_with(function: Any) -> list[ModuleType]:
    """Return the loaded modules whose attention function, defined or imported by name, is `function`."""
    loaded = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    return [module for module in loaded if vars(module).get(_ATTENTION_NAME) is function]


def causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """Return a mask with 0 for visible and -inf for hidden positions, aligned at the top left like is_causal."""
    shape = query.shape[-2], key.shape[-2]
    is_visible = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    return torch.zeros(shape, dtype=query.dtype, device=query.device).masked_fill(~is_visible, -torch.inf)
