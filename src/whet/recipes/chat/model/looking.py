"""Who looks at whom? Each place at itself and at earlier places of its own document, and at nothing else."""

import torch
from torch import Tensor

from whet.device.kernels.attention import Spans, has_span_kernel
from whet.recipes.layers import AttentionArgs, KeyValueCache, rotary_angles


def look_in_documents(is_start: Tensor, *, head_size: int, like: Tensor) -> AttentionArgs:
    """For rows that hold several documents; `is_start` is (B, S), true where one begins. Positions begin anew there.

    What fills a row up is a document of its own at the end, so that nobody looks at it. `like`: what is computed with.
    """
    document = is_start.cumsum(1)
    if has_span_kernel(like, head_size):
        places = torch.arange(is_start.shape[1], device=is_start.device)
        return AttentionArgs(rotation=rotary_angles(places, head_size), spans=_spans(document), is_causal=True)
    is_same = document[:, :, None] == document[:, None, :]
    may_look = is_same & _is_earlier(is_start.shape[1], is_start.device)
    positions = may_look.sum(2) - 1
    return AttentionArgs(rotation=rotary_angles(positions, head_size), mask=_added(may_look, like.dtype)[:, None])


def _spans(document: Tensor) -> Spans:
    """Of all rows, one behind the other; documents are counted in each, (B, S)."""
    rows, length = document.shape
    before = length * torch.arange(rows, device=document.device)[:, None]
    firsts, lasts = (torch.searchsorted(document, document, right=is_end) + before for is_end in (False, True))
    return Spans.of(firsts.flatten(), lasts.flatten())


def look_back(
    positions: Tensor, num_keys: int, *, memory: KeyValueCache | None, head_size: int, dtype: torch.dtype
) -> AttentionArgs:
    """For rows of one document each: (B, S) places of new tokens, which look at all keys at or before them."""
    may_look = torch.arange(num_keys, device=positions.device) <= positions[:, :, None]
    return AttentionArgs(
        rotation=rotary_angles(positions, head_size), mask=_added(may_look, dtype)[:, None], memory=memory
    )


def _is_earlier(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def _added(may_look: Tensor, dtype: torch.dtype) -> Tensor:
    """As numbers that are added to the scores; made once, since kernels would make it anew in every layer."""
    return torch.zeros(may_look.shape, dtype=dtype, device=may_look.device).masked_fill(~may_look, -torch.inf)
