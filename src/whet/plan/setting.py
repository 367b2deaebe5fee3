"""Setting: a value with its reason, source and evidence; and the trials of a measurement."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from whet.base.model import FrozenModel

Scalar = bool | int | float | str | None
Evidence = Mapping[str, Scalar | tuple[Scalar, ...]]
Source = Literal["rule", "measured", "you"]


class Setting(FrozenModel):
    """One setting of a run, and why it has its value.

    `evidence` holds the facts a rule looked at, or repeats, median and spread of a measurement.
    """

    value: Scalar
    reason: str
    source: Source
    evidence: Evidence


class MeasuredSetting(FrozenModel):
    """A value that a measurement chose. It takes precedence over the rule, and the user's override over it."""

    value: Scalar
    reason: str
    evidence: Evidence


Verdict = Literal[
    "faster", "likely", "no gain", "not worth it", "unclear", "cut off", "disagrees", "failed", "not tried"
]
"""faster: significant, and large enough to matter. likely: a gain by its interval, but not yet significant; the final
plan is compared as a whole. no gain: too small to matter, or slower. not worth it: the run is too short to repay the
cost. unclear: the time budget ran out. cut off: stopped because it was very slow. disagrees: computes other results.
"""


class TuneTrial(FrozenModel):
    """One candidate of a measurement and its result, whether faster or not."""

    setting: str
    """What was varied; "plan" where whole plans were compared."""
    settings: Mapping[str, Scalar]
    """All settings that differed from the rule-based plan."""
    against: Mapping[str, Scalar] = Field(default_factory=dict)
    """The same for the plan it was compared with; empty for the rule-based plan itself."""
    verdict: Verdict
    note: str
    repeats: NonNegativeInt = 0
    """Pairs of steps, each pair on the same batches."""
    median_seconds: NonNegativeFloat | None = None
    """Of one optimizer step."""
    baseline_seconds: NonNegativeFloat | None = None
    speedup: NonNegativeFloat | None = None
    """The baseline's time divided by this one's: above 1 is faster."""
    interval: tuple[NonNegativeFloat, NonNegativeFloat] | None = None
    """Distribution-free confidence interval of the speed-up."""
    preparation_seconds: NonNegativeFloat | None = None
    peak_bytes: NonNegativeInt | None = None
    spent_seconds: NonNegativeFloat = 0.0
    """What the trial cost."""
