"""The setting of a plan, with its value, reason, source and evidence, and the trials of a measurement."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from whet.base.model import FrozenModel

Scalar = bool | int | float | str | None
Evidence = Mapping[str, Scalar | tuple[Scalar, ...]]
Source = Literal["rule", "measured", "environment", "you"]


class Setting(FrozenModel):
    """One setting of a run, with the reason for its value.

    `evidence` holds the facts that a rule used, or the repeats, median and spread of a measurement.
    """

    value: Scalar
    reason: str
    source: Source
    evidence: Evidence


class MeasuredSetting(FrozenModel):
    """A value chosen by a measurement. It takes precedence over the rule, but not over the user's override."""

    value: Scalar
    reason: str
    evidence: Evidence


Verdict = Literal[
    "faster", "likely", "no gain", "not worth it", "not checked", "unclear", "cut off", "disagrees", "failed",
    "not tried",
]  # fmt: skip
"""The verdict on a candidate.

faster: the gain is significant and large enough to matter. likely: there seems to be a gain, but it is not significant
yet, and the final plan is compared as a whole. no gain: slower, or the gain is too small. not worth it: the run is too
short to repay the cost. not checked: it was faster, but there was no time to compare compiled code with the model's own
code. unclear: the time budget ran out. cut off: the candidate was stopped, because it was very slow.
disagrees: the candidate computes different results. failed: it raised an error. not tried: it was not measured.
"""


class TuneTrial(FrozenModel):
    """One candidate of a measurement, with its timing and verdict."""

    setting: str
    """The varied setting, or "plan" for a comparison of whole plans."""
    settings: Mapping[str, Scalar]
    """All settings that differ from the rule-based plan."""
    against: Mapping[str, Scalar] = Field(default_factory=dict)
    """Settings of the baseline that differ from the rule-based plan. Empty if that plan is the baseline."""
    verdict: Verdict
    note: str
    repeats: NonNegativeInt = 0
    """Number of timed pairs of steps. Both steps of a pair use the same batches."""
    median_seconds: NonNegativeFloat | None = None
    """Median seconds of one optimizer step."""
    baseline_seconds: NonNegativeFloat | None = None
    speedup: NonNegativeFloat | None = None
    """Step time of the baseline divided by that of this candidate. Above 1, the candidate is faster."""
    interval: tuple[NonNegativeFloat, NonNegativeFloat] | None = None
    """Distribution-free confidence interval of the speedup."""
    preparation_seconds: NonNegativeFloat | None = None
    peak_bytes: NonNegativeInt | None = None
    spent_seconds: NonNegativeFloat = 0.0
    """Seconds spent on the trial."""
