"""The result of `whet bench` on one machine."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from whet.base.errors import UsageError, WhetError
from whet.base.model import FrozenModel
from whet.machine.facts import Machine
from whet.plan.setting import Scalar
from whet.plan.workload import Workload
from whet.run.disk import read_regular_file

FORMAT_VERSION = 1
KIND = "whet bench"

Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# "far slower" means that one or two steps were enough to see the difference.
RowOutcome = Literal["measured", "far slower", "does not fit", "failed", "no time"]


class BenchInterval(FrozenModel):
    """A median and its confidence interval, without assumptions about the noise."""

    median: Amount
    low: Amount
    high: Amount
    confidence: float = Field(ge=0, le=1)
    repeats: PositiveInt


class BenchRow(FrozenModel):
    """One value of the setting that was varied."""

    value: Scalar
    is_plan: bool = False
    """Whether the plan uses this value."""
    execution: Mapping[str, Scalar]
    """Settings of the steps: device, precision, micro_batch and so on."""
    outcome: RowOutcome
    note: str = ""
    """Reason why there are no numbers, or another remark."""
    step_seconds: BenchInterval | None = None
    """Step time of this value, including the effects of other load on the machine."""
    samples_per_second: BenchInterval | None = None
    """Rate of the plan. For other values with paired steps, the plan's rate times their speedup."""
    speedup: BenchInterval | None = None
    """Speedup over the plan, from pairs of consecutive steps on the same batches."""
    peak_bytes: NonNegativeInt | None = None
    needed_bytes: NonNegativeInt | None = None
    """Predicted memory, if it was not measured."""
    slow_steps: Amount | None = None
    """95th percentile of the step time, as a multiple of the median."""
    drift: Amount | None = None
    """Step time in the second half of the measurement, as a multiple of that in the first half."""


class BenchSweep(FrozenModel):
    """One setting varied, all others as in the plan."""

    setting: str
    """Name of the varied setting, "against" for a comparison of whole plans, or "arch" for other models."""
    rows: tuple[BenchRow, ...] = ()
    note: str = ""


class BenchResult(FrozenModel):
    """The result of `whet bench` on one machine."""

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
    """Memory limit of the plan."""
    budget_seconds: Amount
    spent_seconds: Amount
    sweeps: tuple[BenchSweep, ...] = ()
    disturbances: tuple[str, ...] = ()
    """Disturbances of the measurement, such as throttling, drift or other programs."""
    versions: Mapping[str, str | None] = Field(default_factory=dict)

    @property
    def is_simulated(self) -> bool:
        """Whether the machine was not probed. Its numbers do not describe a real machine then."""
        return self.machine.origin != "probed"

    def sweep(self, setting: str) -> BenchSweep | None:
        """Return the sweep of one setting, or None if it was not varied."""
        return next((sweep for sweep in self.sweeps if sweep.setting == setting), None)

    def best_by_device(self) -> Iterator[BenchRow]:
        """Yield one row per device: that of the plan, or that of the device sweep."""
        # Skip the sweep over global batches: its values are not timed in alternating pairs.
        sweeps = [sweep for sweep in self.sweeps if sweep.setting != "global_batch_size"]
        rows = [row for sweep in sweeps for row in sweep.rows if row.is_plan or sweep.setting == "device"]
        measured = [row for row in rows if row.samples_per_second is not None]
        for device in dict.fromkeys(row.execution.get("device") for row in measured):
            own = [row for row in measured if row.execution.get("device") == device]
            yield max(own, key=lambda row: row.samples_per_second.repeats if row.samples_per_second else 0)


def encode_bench(result: BenchResult) -> bytes:
    return (json.dumps(result.as_json(), indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode()


def read_bench(path: Path) -> BenchResult:
    try:
        fields = json.loads(read_regular_file(path, follows_links=True))
    except FileNotFoundError:
        raise UsageError("no such benchmark", got=str(path), try_="check the path") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError("cannot read the benchmark", got=f"{path}: {error}"[:300], try_=_TRY) from None
    if not isinstance(fields, dict) or fields.get("kind") != KIND:
        raise UsageError("not a benchmark result of whet", got=str(path), try_=_TRY)
    if fields.get("format_version") != FORMAT_VERSION:
        raise WhetError(
            f"{path} was written by another version of whet",
            got=f"format {fields.get('format_version')!r}; this one reads {FORMAT_VERSION}"[:200],
            try_="the same version of whet on all machines",
        )
    return BenchResult.from_json(fields, where=path)


_TRY = "a file that whet bench RECIPE --out FILE.json wrote"
