"""How did the global batch come about where it was left to whet? Measured once, kept with the run, never again."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from whet.base.record import Record

Scaling = Literal["linear", "square root"]


class BatchPoint(Record):
    """One global batch that was tried."""

    batch: PositiveInt
    samples_per_second: PositiveFloat | None = None
    """None where no step could be measured."""
    low: PositiveFloat | None = None
    high: PositiveFloat | None = None
    confidence: float = 0.0
    """That the true median lies between the two."""
    steps: NonNegativeInt = 0
    micro_batch: PositiveInt | None = None
    peak_bytes: NonNegativeInt | None = None
    words: str = ""
    """Why there is no number."""


class ChosenBatch(Record):
    """The global batch at the knee, and the learning rates that go with it."""

    batch: PositiveInt
    base_batch: PositiveInt
    """The one that the learning rate was meant for."""
    base_rates: tuple[NonNegativeFloat, ...] = Field(min_length=1)
    """As they were given, one for each group of parameters."""
    rates: tuple[NonNegativeFloat, ...] = Field(min_length=1)
    """What is trained with."""
    factor: PositiveFloat
    """What each was multiplied by."""
    scaling: Scaling
    reason: str
    rate_reason: str
    points: tuple[BatchPoint, ...] = ()
    """All that were tried, the smallest first."""
    spent_seconds: NonNegativeFloat = 0.0

    @property
    def lines(self) -> tuple[str, ...]:
        """What to tell whoever asked for it."""
        return f"global batch {self.reason}", self.rate_reason
