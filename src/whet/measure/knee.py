"""Which global batch would use this machine well? Asked only where the user left the batch to whet: it is theirs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from whet.base.errors import UsageError
from whet.base.units import show_share
from whet.plan.chosen_batch import Scaling

_WITHIN = 0.10
_WHY: Mapping[Scaling, str] = {
    "linear": "the noise of a mean over more samples is smaller, and SGD takes its steps in proportion: Goyal et al. "
    "2017, arXiv:1706.02677",
    "square root": "Adam and its kin divide by the gradient's own size, which holds the noise as its root: Malladi et "
    "al. 2022, arXiv:2205.10287",
}

_SCALING: Mapping[str, Scaling] = {
    "sgd": "linear",
    **dict.fromkeys(
        (
            "adam",
            "adamw",
            "adam_atan2",
            "adamax",
            "nadam",
            "radam",
            "sparseadam",
            "adafactor",
            "rmsprop",
            "adagrad",
        ),
        "square root",
    ),
}


def scaling_of(optimizer: str) -> Scaling:
    """How an optimizer's learning rate goes with the batch; refused where nobody knows.

    >>> scaling_of("AdamW"), scaling_of("SGD")
    ('square root', 'linear')
    """
    found = _SCALING.get(optimizer.lower())
    if found is None:
        raise UsageError(
            "how this optimizer's learning rate goes with the batch is not known",
            got=f"global_batch_size=auto with {optimizer}",
            try_="global_batch_size=N, with a learning rate for it",
        )
    return found


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
        share = show_share(self.samples_per_second / self.best_samples_per_second)
        return f"{self.batch}: the smallest within 10 % of the fastest ({share} of {self.best_batch})"


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


def rate_factor(*, before: int, after: int, scaling: Scaling) -> float:
    """What a learning rate is multiplied by for another global batch."""
    return after / before if scaling == "linear" else math.sqrt(after / before)


def scale_learning_rate(rate: float, *, before: int, after: int, scaling: Scaling) -> tuple[float, str]:
    """The learning rate for another global batch, and how it came about.

    >>> scale_learning_rate(0.1, before=32, after=128, scaling="square root")
    (0.2, 'lr 0.1 at batch 32 becomes 0.2 at batch 128 (times the square root of 4)')
    """
    scaled, larger = rate * rate_factor(before=before, after=after, scaling=scaling), after / before
    times = f"times {larger:g}" if scaling == "linear" else f"times the square root of {larger:g}"
    return scaled, f"lr {rate:g} at batch {before} becomes {scaled:.3g} at batch {after} ({times})"


def rate_words(rates: tuple[float, ...], *, before: int, after: int, scaling: Scaling) -> str:
    """How learning rates are scaled, and why so."""
    if before == after:
        return f"lr stays {', '.join(f'{rate:g}' for rate in rates)}: it is meant for this batch"
    told = [scale_learning_rate(rate, before=before, after=after, scaling=scaling)[1] for rate in dict.fromkeys(rates)]
    return f"{'; '.join(told)}: {_WHY[scaling]}"
