"""Which global batch would use this machine well? Asked only where the user left the batch to whet: it is theirs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from whet.base.errors import UsageError

_WITHIN = 0.10

Scaling = Literal["linear", "square root"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Knee:
    """The smallest batch that is nearly as fast as the fastest one."""

    batch: int
    samples_per_second: float
    best_batch: int
    best_samples_per_second: float

    @property
    def words(self) -> str:
        """One line."""
        if self.batch == self.best_batch:
            return f"{self.batch}: the fastest of those measured, and none smaller comes within 10 % of it"
        share = self.samples_per_second / self.best_samples_per_second
        return f"{self.batch}: the smallest within 10 % of the fastest ({share:.0%} of {self.best_batch})"


def find_knee(points: Mapping[int, float]) -> Knee:
    """From samples per second by batch size.

    >>> find_knee({8: 400.0, 16: 700.0, 32: 920.0, 64: 1000.0}).batch
    32
    """
    usable = {batch: rate for batch, rate in points.items() if batch > 0 and math.isfinite(rate) and rate > 0}
    if not usable:
        raise UsageError("no batch size could be measured", got=dict(points), try_="global_batch_size=N")
    best = max(usable, key=lambda batch: (usable[batch], -batch))
    batch = min(batch for batch, rate in usable.items() if rate >= (1 - _WITHIN) * usable[best])
    return Knee(batch=batch, samples_per_second=usable[batch], best_batch=best, best_samples_per_second=usable[best])


def scale_learning_rate(rate: float, *, before: int, after: int, scaling: Scaling) -> tuple[float, str]:
    """The learning rate for another global batch, and how it came about.

    The noise of a gradient falls with the batch: plain SGD takes steps in proportion, Adam divides by the gradient's
    own size and takes the root.

    >>> scale_learning_rate(0.1, before=32, after=128, scaling="square root")
    (0.2, 'lr 0.1 at batch 32 becomes 0.2 at batch 128 (times the square root of 4)')
    """
    factor = after / before
    scaled = rate * (factor if scaling == "linear" else math.sqrt(factor))
    times = f"times {factor:g}" if scaling == "linear" else f"times the square root of {factor:g}"
    return scaled, f"lr {rate:g} at batch {before} becomes {scaled:.3g} at batch {after} ({times})"
