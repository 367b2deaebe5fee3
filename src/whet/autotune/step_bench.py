"""The interface for timing optimizer steps under different settings, with its time budget and progress reports."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from whet.base.errors import WhetError
from whet.plan.plan import Plan
from whet.plan.setting import Scalar

# Settings that differ from the rule-based plan; the rules decide all others again (`candidates.plan_with`).
Settings = Mapping[str, Scalar]

# refused: the bench cannot run these settings and did not try.
FailureKind = Literal["crash", "oom", "timeout", "error", "refused"]

# Callers plan with their budget; whatever hangs is killed by the bench this much later.
TIMEOUT_FACTOR = 1.08
_MIN_REPORT_SECONDS = 0.25


class ProbeFailedError(WhetError):
    """Settings could not be measured. That is evidence, and the search continues."""

    def __init__(self, reason: str, *, kind: FailureKind) -> None:
        super().__init__("a probe failed", got=f"{kind}: {reason}", try_="the settings of the rule-based plan")
        self.reason = reason
        self.kind: FailureKind = kind


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingsAgreement:
    """Whether settings compute the same loss and gradients as fp32, within a bound."""

    agrees: bool
    loss_error: float
    gradient_error: float
    bound: float


class PreparedStep(Protocol):
    """A workload under some settings, ready to step. At most two are alive at the same time."""

    @property
    def preparation_seconds(self) -> float:
        """Building, compiling and first steps: what a run under these settings pays once."""

    @property
    def step_seconds(self) -> float:
        """The last step of the preparation, as an estimate of the next one."""

    def step(self, index: int) -> float:
        """Run one optimizer step on the index-th fixed global batch and return its seconds, device synchronized.

        Any index from 0 on is valid; the same index is the same batch under all settings.
        """

    def peak_bytes(self) -> int | None:
        """The peak memory since the preparation began; None if unknown. Valid after `close` too."""

    def close(self) -> None:
        """Release everything. No step follows."""


class StepBench(Protocol):
    """Times steps of one workload on one machine. Simulated benches run on a virtual clock."""

    ends_at: float | None
    """The time on the clock after which nothing is waited for, if the bench can enforce it."""

    tick: Callable[[], None] | None
    """Called repeatedly while the bench waits, if it can."""

    @property
    def plan(self) -> Plan:
        """The rule-based plan."""

    @property
    def about(self) -> Mapping[str, Any]:
        """The description of the workload, as the key of cached results."""

    @property
    def recovery_seconds(self) -> float:
        """What an aborted probe costs besides its own time, before anything can be prepared again."""

    def clock(self) -> float:
        """Seconds since an arbitrary origin; everything the bench does takes time on this clock."""

    def predicted_bytes(self, settings: Settings) -> int | None:
        """Predict the memory of a step without running one; None if unknown."""

    def agreement(self, settings: Settings, *, seconds: float) -> SettingsAgreement:
        """Compare loss and gradients with fp32. Raises ProbeFailedError."""

    def prepare(self, settings: Settings, *, seconds: float) -> PreparedStep:
        """Build, compile and run at least one step, within `seconds` if possible. Raises ProbeFailedError."""

    def use_batch(self, size: int) -> None:
        """Change the global batch; `plan` becomes the rules' plan for it. Prepared steps become invalid.

        Raises ProbeFailedError.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """A time budget on the clock of a bench."""

    clock: Callable[[], float]
    start: float
    seconds: float

    @property
    def end(self) -> float:
        """The time on the clock at which it is used up."""
        return self.start + self.seconds

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.start

    @property
    def left(self) -> float:
        """Seconds until the end, never negative."""
        return max(0.0, self.end - self.clock())


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningProgress:
    """The current state of a measurement."""

    doing: str
    """What is being measured, such as "precision bf16"."""
    spent_seconds: float
    budget_seconds: float

    @property
    def message(self) -> str:
        """One line.

        >>> TuningProgress(doing="precision bf16", spent_seconds=12.3, budget_seconds=60).message
        'measuring: precision bf16, 12 of 60 s'
        """
        return f"measuring: {self.doing}, {self.spent_seconds:.0f} of {self.budget_seconds:.0f} s"

    def as_event(self) -> dict[str, object]:
        """The fields of a progress event."""
        return {"message": self.message, **asdict(self)}


# Called a few times a second at most; its own time counts against the budget.
ProgressCallback = Callable[[TuningProgress], None]


class ProgressReporter:
    """Reports what is measured: at once when it changes, then at intervals."""

    def __init__(self, callback: ProgressCallback | None, budget: Budget) -> None:
        self._callback = callback
        self._budget = budget
        self._doing = ""
        self._reported_at = float("-inf")

    def begin(self, doing: str) -> None:
        """Report that something else is measured from now on."""
        self._doing = doing
        self._report()

    def tick(self) -> None:
        """Report again if the last report is a while ago."""
        if self._budget.clock() - self._reported_at >= _MIN_REPORT_SECONDS:
            self._report()

    def _report(self) -> None:
        if self._callback is None or not self._doing:
            return
        self._reported_at = self._budget.clock()
        spent = min(self._budget.spent, self._budget.seconds)
        self._callback(TuningProgress(doing=self._doing, spent_seconds=spent, budget_seconds=self._budget.seconds))
