"""When is this run finished? Preparing counts as well as stepping: what costs time must earn it back in this run."""

import math
from dataclasses import dataclass

from whet.base.units import show_seconds

MOST_BUDGET = 60.0
_SHARE_OF_RUN = 0.03
_UNKNOWN_STEPS = 100


def budget_seconds(run_seconds: float | None, *, most: float = MOST_BUDGET) -> float:
    """What measuring may cost: a minute, and no more than 3 % of the run it is for.

    >>> budget_seconds(600), budget_seconds(36_000), budget_seconds(None)
    (18.0, 60.0, 60.0)
    """
    return most if run_seconds is None else min(most, _SHARE_OF_RUN * run_seconds)


def finish_seconds(*, preparation: float, step: float, num_steps: int, planning: float = 0.0) -> float:
    """The time from now until the last step is made."""
    return planning + preparation + num_steps * step


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakEven:
    """Something that costs time before the first step and saves some in each."""

    cost_seconds: float
    saved_seconds: float
    """In each step; below zero where steps became slower."""
    num_steps: int | None
    """Of this run; None when nobody knows."""

    @property
    def step(self) -> int | None:
        """After which step it has paid for itself; None for never."""
        if self.cost_seconds <= 0:
            return 0
        return math.ceil(self.cost_seconds / self.saved_seconds) if self.saved_seconds > 0 else None

    @property
    def pays(self) -> bool:
        """Whether this run ends sooner; a run of unknown length is taken for a short one."""
        num_steps = _UNKNOWN_STEPS if self.num_steps is None else self.num_steps
        return self.saved_seconds * num_steps > self.cost_seconds

    def words(self, doing: str) -> str:
        """One line.

        >>> BreakEven(cost_seconds=38, saved_seconds=0.12, num_steps=5_000).words("compile")
        '38 s to compile, saves 120 ms a step, pays after step 317 of 5,000'
        >>> BreakEven(cost_seconds=38, saved_seconds=0.03, num_steps=700).words("compile")
        '38 s to compile, would save 21 s of this run'
        """
        cost = f"{show_seconds(self.cost_seconds)} to {doing}"
        if self.step is None:
            return f"{cost}, and saves nothing"
        if self.num_steps is None:
            return f"{cost}, pays after step {self.step:,}; how many this run has is unknown"
        if self.pays:
            saved = show_seconds(self.saved_seconds)
            return f"{cost}, saves {saved} a step, pays after step {self.step:,} of {self.num_steps:,}"
        return f"{cost}, would save {show_seconds(self.saved_seconds * self.num_steps)} of this run"
