"""Which token is taken? The likeliest at temperature 0, else one drawn from what top-k and top-p leave."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from whet.base.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How to choose."""

    temperature: float = 0.7
    """What scores are divided by before they become probabilities; 0 takes the likeliest."""
    top_k: int = 50
    """Only so many of the likeliest; 0 for all."""
    top_p: float = 0.9
    """Only the smallest set of the likeliest that has this much of the probability; 1 for all."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, is_right, law in (
            ("temperature", self.temperature, 0 <= self.temperature <= 100, "from 0 to 100"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (all) or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1"),
        ):
            if not is_right:
                raise UsageError(f"{name} must be {law}", got=value, try_=f"{name} {getattr(_DEFAULT, name)}")

    def draws(self) -> Random:
        """Where the numbers for one row come from: from its seed alone, whoever else is in the batch."""
        return Random(self.seed)


def choose(logits: Tensor, how: Sampling, draws: Random) -> int:
    """The next token from its scores, (V) on the CPU; minus infinity for what must not be said."""
    if how.temperature == 0:
        return int(logits.argmax())
    ids, shares = distribution(logits, how)
    # The first place where the sum of shares passes the draw; rounding must not lead beyond the last.
    place = int(torch.searchsorted(shares.cumsum(0), draws.random(), right=True))
    return int(ids[min(place, len(ids) - 1)])


def distribution(logits: Tensor, how: Sampling) -> tuple[Tensor, Tensor]:
    """The tokens that may be taken, likeliest first, and their probabilities, float64.

    Top-k comes first, and top-p is of what that leaves: as few tokens as have at least that much, the one that passes
    the threshold among them.
    """
    scores, ids = logits.double().sort(descending=True, stable=True)
    num_said = int((scores > -torch.inf).sum())
    count = min(how.top_k, num_said) if how.top_k else num_said
    # From the likeliest on: scores themselves, divided by almost nothing, would be infinite, and shares no numbers.
    shares = ((scores[:count] - scores[0]) / how.temperature).softmax(0)
    if how.top_p < 1:
        before = shares.cumsum(0) - shares
        count = max(1, int((before < how.top_p).sum()))
    shares = shares[:count]
    return ids[:count], shares / shares.sum()


def forbid(logits: Tensor, ids: Sequence[int]) -> Tensor:
    """The scores with these tokens made impossible."""
    logits = logits.clone()
    logits[..., list(ids)] = -torch.inf
    return logits


_DEFAULT = Sampling()
