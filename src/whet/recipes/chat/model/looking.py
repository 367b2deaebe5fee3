"""Who looks at whom? Each place at itself and at earlier places of its own document, and at nothing else."""

import torch
from torch import Tensor

from whet.device.own.wanted import is_attention_wanted
from whet.device.unpadded_attention import can_attend
from whet.recipes.recursive.layers import Documents, Look, Memory, rotation


def look_in_documents(is_start: Tensor, *, head_size: int, dtype: torch.dtype, most: int | None = None) -> Look:
    """For rows that hold several documents; `is_start` is (B, S), true where one begins. Positions begin anew there.

    What fills a row up is a document of its own at the end, so that nobody looks at it. With `most`, the number of
    documents that no row exceeds, documents are attended one by one where that is wanted (attention=own).
    """
    if most is not None and is_attention_wanted() and can_attend(is_start.device, dtype, head_size=head_size):
        return _look_apart(is_start, most, head_size=head_size)
    document = is_start.cumsum(1)
    is_same = document[:, :, None] == document[:, None, :]
    may_look = is_same & _is_earlier(is_start.shape[1], is_start.device)
    positions = may_look.sum(2) - 1
    return Look(rotation=rotation(positions, head_size), mask=_added(may_look, dtype)[:, None])


def look_back(positions: Tensor, num_keys: int, *, memory: Memory | None, head_size: int, dtype: torch.dtype) -> Look:
    """For rows of one document each: (B, S) places of new tokens, which look at all keys at or before them."""
    may_look = torch.arange(num_keys, device=positions.device) <= positions[:, :, None]
    return Look(rotation=rotation(positions, head_size), mask=_added(may_look, dtype)[:, None], memory=memory)


def _look_apart(is_start: Tensor, most: int, *, head_size: int) -> Look:
    """Without a mask. The number of documents is not asked for, which would wait for the device: there is room for all
    that may come."""
    num_rows, length = is_start.shape
    room = num_rows * most
    places = torch.arange(num_rows * length, device=is_start.device, dtype=torch.int32)
    in_line = is_start.flatten()
    document = in_line.cumsum(0)
    # A place that begins nothing writes into a cell behind, which nobody reads.
    cells = torch.where(in_line, document - 1, room + 1).clamp(max=room + 1)
    starts = places.new_full((room + 2,), num_rows * length).scatter(0, cells, places)[: room + 1]
    begin = torch.where(in_line, places, 0).cummax(0).values
    # More documents than were promised would be attended wrongly: then nothing that comes out is a number.
    positions = (places - begin).float().masked_fill(document[-1] > room, torch.nan)
    return Look(
        rotation=rotation(positions.view_as(is_start), head_size), documents=Documents(starts=starts, longest=length)
    )


def _is_earlier(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def _added(may_look: Tensor, dtype: torch.dtype) -> Tensor:
    """As numbers that are added to the scores; made once, since kernels would make it anew in every layer."""
    return torch.zeros(may_look.shape, dtype=dtype, device=may_look.device).masked_fill(~may_look, -torch.inf)
