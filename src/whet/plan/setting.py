"""Setting: a value with its reason, source and evidence; and the trials of a measurement."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from whet.base.model import FrozenModel

Scalar = bool | int | float | str | None
Evidence = Mapping[str, Scalar | tuple[Scalar, ...]]
Source = Literal["rule", "measured", "you"]


class Setting(FrozenModel):
    """What a run does in one respect, and why.

    `evidence` holds what stands behind it: the facts a rule looked at, or repeats, median and spread of a measurement.
    """

    value: Scalar
    reason: str
    source: Source
    evidence: Evidence


class MeasuredSetting(FrozenModel):
    """What a measurement says about one setting: it goes before the rule and behind the user's own word."""

    value: Scalar
    reason: str
    evidence: Evidence


Verdict = Literal[
    "faster", "likely", "no gain", "not worth it", "unclear", "cut off", "disagrees", "failed", "not tried"
]
"""faster: real and worth having. likely: a gain by its interval, not yet with the certainty of a claim; what is best in
the end has to prove itself as a whole. no gain: less than is worth having, or slower. not worth it: this run is too
short to earn back what it costs. unclear: the time was out. cut off: so slow that it was stopped. disagrees: it
computes something else.
"""


class TuneTrial(FrozenModel):
    """Evidence about one candidate, faster or not."""

    setting: str
    """What was varied; "plan" where whole plans were compared."""
    settings: Mapping[str, Scalar]
    """What differed from the rule-based plan, all in all."""
    against: Mapping[str, Scalar] = Field(default_factory=dict)
    """What the rival's settings differed in; empty for the rule-based plan itself."""
    verdict: Verdict
    words: str
    repeats: NonNegativeInt = 0
    """Pairs of steps, each pair on the same batches."""
    median_seconds: NonNegativeFloat | None = None
    """Of one optimizer step."""
    rival_seconds: NonNegativeFloat | None = None
    speedup: NonNegativeFloat | None = None
    """The rival's time as a multiple of this one's: above 1 is faster."""
    interval: tuple[NonNegativeFloat, NonNegativeFloat] | None = None
    """Where the speed-up lies, whatever the noise is like."""
    preparation_seconds: NonNegativeFloat | None = None
    peak_bytes: NonNegativeInt | None = None
    spent_seconds: NonNegativeFloat = 0.0
    """What the trial cost."""
