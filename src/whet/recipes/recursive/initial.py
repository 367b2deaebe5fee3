"""What are the first weights? Normal numbers without the rare large ones, with the deviation that was asked for."""

import math

import torch
from torch import Tensor

_CUT = 2.0
"""Drawn numbers lie within so many deviations, before they are widened."""
_INSIDE = math.erf(_CUT / math.sqrt(2))
_DENSITY = math.exp(-(_CUT**2) / 2) / math.sqrt(2 * math.pi)
_WIDEN = 1 / math.sqrt(1 - 2 * _CUT * _DENSITY / _INSIDE)
"""Cutting makes a normal narrower, to a deviation of 0.8796; this makes it 1 again."""


@torch.no_grad()
def truncated_normal_(weights: Tensor, *, deviation: float) -> Tensor:
    """Fills with draws of torch's generator that have this deviation, none of them beyond 2.27 times it.

    >>> drawn = truncated_normal_(torch.empty(100_000), deviation=0.5)
    >>> round(float(drawn.std()), 2), bool(drawn.abs().max() < 1.14)
    (0.5, True)
    """
    edge = _CUT * _WIDEN * deviation
    weights.uniform_(-_INSIDE, _INSIDE).erfinv_()
    return weights.mul_(math.sqrt(2) * _WIDEN * deviation).clamp_(-edge, edge)
