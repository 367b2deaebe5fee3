"""One decision: a value that never travels without its reason, its source and its evidence."""

from collections.abc import Mapping
from typing import Literal

from whet.base.record import Record

Scalar = bool | int | float | str | None
Evidence = Mapping[str, Scalar | tuple[Scalar, ...]]
Source = Literal["rule", "measured", "you"]


class Setting(Record):
    """What a run does in one respect, and why.

    `evidence` holds what stands behind it: the facts a rule looked at, or repeats, median and spread of a measurement.
    """

    value: Scalar
    reason: str
    source: Source
    evidence: Evidence


class Measured(Record):
    """What a measurement says about one setting: it goes before the rule and behind the user's own word."""

    value: Scalar
    reason: str
    evidence: Evidence
