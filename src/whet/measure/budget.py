"""How much time is left for measuring?"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Seconds on a rig's clock, counted from when the search began."""

    clock: Callable[[], float]
    start: float
    seconds: float

    @property
    def end(self) -> float:
        """When it is used up, on the clock."""
        return self.start + self.seconds

    @property
    def spent(self) -> float:
        """Seconds since the search began."""
        return self.clock() - self.start

    @property
    def left(self) -> float:
        """Seconds until the end, zero after it."""
        return max(0.0, self.end - self.clock())
