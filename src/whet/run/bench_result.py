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
# far slower: so slow that one or two steps were enough to see it.
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
    """Whether it is the value of the plan."""
    execution: Mapping[str, Scalar]
    """How steps were executed: device, precision, micro_batch and so on."""
    outcome: RowOutcome
    note: str = ""
    """Why there are no numbers, or another remark."""
    step_seconds: BenchInterval | None = None
    """From its own times, whatever else the machine did meanwhile."""
    samples_per_second: BenchInterval | None = None
    """The rate of the plan; for other values that rate times their speed-up, where there were pairs."""
    speedup: BenchInterval | None = None
    """Against the plan, from pairs of steps on the same batches, one right after the other."""
    peak_bytes: NonNegativeInt | None = None
    needed_bytes: NonNegativeInt | None = None
    """Predicted, where it was not measured."""
    slow_steps: Amount | None = None
    """The time of the slowest twentieth of steps (95th percentile) as a multiple of the median."""
    drift: Amount | None = None
    """The step time in the second half of the measurement as a multiple of the first half."""


class BenchSweep(FrozenModel):
    """One setting varied, all others as in the plan."""

    setting: str
    """ "against" for a comparison of the whole plan, "arch" for other models."""
    rows: tuple[BenchRow, ...] = ()
    note: str = ""


class BenchResult(FrozenModel):
    """The result of `whet bench` on one machine."""

    kind: Literal["whet bench"] = "whet bench"
    format_version: int = FORMAT_VERSION
    created: str
    """The date, as in 2026-11-15."""
    machine: Machine
    workload: Workload
    plan: Mapping[str, Scalar]
    """The settings of the plan that everything is compared with."""
    plan_source: Literal["rules", "measured"] = "rules"
    limit_bytes: PositiveInt | None = None
    """The memory limit of a step in the plan."""
    budget_seconds: Amount
    spent_seconds: Amount
    sweeps: tuple[BenchSweep, ...] = ()
    disturbances: tuple[str, ...] = ()
    """Disturbances during the measurement: throttling, drift, other programs."""
    versions: Mapping[str, str | None] = Field(default_factory=dict)

    @property
    def is_simulated(self) -> bool:
        """Whether the machine was not probed: then no number here is about a real one."""
        return self.machine.origin != "probed"

    def sweep(self, setting: str) -> BenchSweep | None:
        """The sweep of one setting."""
        return next((sweep for sweep in self.sweeps if sweep.setting == setting), None)

    def best_by_device(self) -> Iterator[BenchRow]:
        """For each device the plan's own row, or the one of the device sweep."""
        # A curve over global batches is not measured in alternation.
        sweeps = [sweep for sweep in self.sweeps if sweep.setting != "global_batch_size"]
        rows = [row for sweep in sweeps for row in sweep.rows if row.is_plan or sweep.setting == "device"]
        measured = [row for row in rows if row.samples_per_second is not None]
        for device in dict.fromkeys(row.execution.get("device") for row in measured):
            own = [row for row in measured if row.execution.get("device") == device]
            yield max(own, key=lambda row: row.samples_per_second.repeats if row.samples_per_second else 0)


def encode_bench(result: BenchResult) -> bytes:
    """Encode a result as the bytes of its file."""
    return (json.dumps(result.as_json(), indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode()


def read_bench(path: Path) -> BenchResult:
    """Read a result from its file."""
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
