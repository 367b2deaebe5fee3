"""The result of `whet bench` on one machine."""

import json
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from whet.base.model import FrozenModel
from whet.machine.facts import Machine
from whet.plan.setting import Scalar
from whet.plan.workload import Workload

FORMAT_VERSION = 1

Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# "far slower": one or two steps were enough to see the difference.
RowOutcome = Literal["measured", "far slower", "does not fit", "failed", "no time"]


class BenchInterval(FrozenModel):
    """A median and its confidence interval, computed without assumptions about the noise."""

    median: Amount
    low: Amount
    high: Amount
    confidence: float = Field(ge=0, le=1)
    repeats: PositiveInt


class BenchRow(FrozenModel):
    """The timing and memory for one value of a swept setting."""

    value: Scalar
    is_plan: bool = False
    """Whether the plan uses this value."""
    execution: Mapping[str, Scalar]
    """Settings that the steps ran with, such as device, precision and micro_batch."""
    outcome: RowOutcome
    note: str = ""
    """The reason why the row has no measurements, or a remark about them."""
    step_seconds: BenchInterval | None = None
    """Step time with this value, including the effects of other load on the machine."""
    samples_per_second: BenchInterval | None = None
    """Rate of the plan. For other values with paired steps, it is the plan's rate multiplied by their speedup."""
    speedup: BenchInterval | None = None
    """Speedup over the plan, from pairs of consecutive steps on the same batches."""
    peak_bytes: NonNegativeInt | None = None
    needed_bytes: NonNegativeInt | None = None
    """Predicted memory, if it was not measured."""
    slow_steps: Amount | None = None
    """95th percentile of the step time, as a multiple of the median."""
    drift: Amount | None = None
    """Step time in the second half of the measurement, as a multiple of the step time in the first half."""


class BenchSweep(FrozenModel):
    """The results for all values of one setting, with all other settings as in the plan."""

    setting: str
    """Name of the varied setting, or "against" for a comparison of whole plans."""
    rows: tuple[BenchRow, ...] = ()
    note: str = ""


class BenchResult(FrozenModel):
    """All results of one `whet bench`: the machine, the plan and every sweep."""

    kind: Literal["whet bench"] = "whet bench"
    format_version: int = FORMAT_VERSION
    created: str
    """Date of the measurement, such as 2026-11-15."""
    machine: Machine
    workload: Workload
    plan: Mapping[str, Scalar]
    """Settings of the plan that serves as the baseline."""
    plan_source: Literal["rules", "measured"] = "rules"
    limit_bytes: PositiveInt | None = None
    """The plan's memory limit."""
    budget_seconds: Amount
    spent_seconds: Amount
    sweeps: tuple[BenchSweep, ...] = ()
    disturbances: tuple[str, ...] = ()
    """Disturbances of the measurement, such as throttling, drift or other programs."""
    versions: Mapping[str, str | None] = Field(default_factory=dict)

    @property
    def is_simulated(self) -> bool:
        """Whether the machine was not probed, in which case the figures do not describe a real machine."""
        return self.machine.origin != "probed"

    def sweep(self, setting: str) -> BenchSweep | None:
        """Return the sweep of one setting, or None if it was not varied."""
        return next((sweep for sweep in self.sweeps if sweep.setting == setting), None)


def encode_bench(result: BenchResult) -> bytes:
    return (json.dumps(result.as_json(), indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode()
