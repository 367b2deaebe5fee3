"""Interface for timing optimizer steps under different settings, with a time budget and progress reports."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from whet.base.errors import WhetError
from whet.plan.plan import Plan
from whet.plan.setting import Scalar

# Settings that differ from the rule-based plan. The rules decide all others again (`candidates.plan_with`).
Settings = Mapping[str, Scalar]

# "unsupported": the bench cannot run these settings.
FailureKind = Literal["crash", "oom", "timeout", "error", "unsupported"]

# Callers stay within their budget. The bench kills a hanging probe at this multiple of the budget.
TIMEOUT_FACTOR = 1.08
# Minimum seconds between two progress reports.
_MIN_REPORT_SECONDS = 0.25


class ProbeFailedError(WhetError):
    """Raised when settings cannot be measured. The search records the failure and continues."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchFacts:
    """What the first steps have shown if the plan lets them decide whether steps are captured (graph=launch_bound)."""

    is_captured: bool | None = None
    """Whether steps are captured; None if that is not known."""
    share: float | None = None
    """The fraction of an eager step that launching its kernels took; None if it was not timed."""
    obstacle: str | None = None
    """The reason why steps are not captured; None if they are."""


class PreparedStep(Protocol):
    """A workload that is ready to run steps with some settings. At most two exist at a time."""

    @property
    def preparation_seconds(self) -> float:
        """One-time cost of these settings: seconds spent on building, compiling and the first steps."""

    @property
    def step_seconds(self) -> float:
        """Seconds of the last step of the preparation, an estimate of the next step."""

    @property
    def launches(self) -> LaunchFacts:
        """What the preparation has shown about capturing these steps."""

    def step(self, index: int) -> float:
        """Run one optimizer step on a fixed global batch, and return its seconds including device synchronization.

        `index` is any non-negative number. The same index selects the same batch under all settings.
        """

    def check(self, *, seconds: float) -> None:
        """Raise ProbeFailedError if the results of compiled code differ from those of the eager model.

        The kind of the error is "timeout" if this could not be decided within `seconds`.
        """

    def peak_bytes(self) -> int | None:
        """Return the peak memory in bytes since the preparation began, or None if unknown. Valid after `close`."""

    def close(self) -> None:
        """Release all resources of these settings. No further steps are allowed."""


class StepBench(Protocol):
    """Times steps of one workload on one machine. Simulated benches use a virtual clock."""

    ends_at: float | None
    """Time on the clock at which a pending probe is killed, if the bench supports it, or None for no limit."""

    tick: Callable[[], None] | None
    """Function that is called repeatedly while the bench waits, if the bench supports it."""

    @property
    def plan(self) -> Plan:
        """The rule-based plan for the workload and the current batch size."""

    @property
    def about(self) -> Mapping[str, Any]:
        """Description of the machine and the workload, used as the key of cached results."""

    @property
    def recovery_seconds(self) -> float:
        """Seconds from the end of an aborted probe until the bench can prepare again."""

    def clock(self) -> float:
        """Return the seconds since an arbitrary origin. All work of the bench takes time on this clock."""

    def predicted_bytes(self, settings: Settings) -> int | None:
        """Predict the memory of a step in bytes without running it. Return None if unknown."""

    def agreement(self, settings: Settings, *, seconds: float) -> SettingsAgreement:
        """Compare the loss and gradients under these settings with fp32, within `seconds`.

        Raise ProbeFailedError on failure.
        """

    def prepare(self, settings: Settings, *, seconds: float) -> PreparedStep:
        """Build the workload, compile it and run at least one step, within `seconds` if possible.

        Raise ProbeFailedError on failure.
        """

    def use_batch(self, size: int) -> None:
        """Change the global batch size. `plan` becomes the rule-based plan for it, and prepared steps become invalid.

        Raise ProbeFailedError on failure.
        """


@dataclass(kw_only=True, slots=True)
class Budget:
    """A time budget on the clock of a bench. Compilation may extend it."""

    clock: Callable[[], float]
    start: float
    seconds: float
    compile_seconds: float = 0.0
    """Seconds that compilation may take beyond `seconds`. Used time is moved from here to `seconds`."""

    @property
    def end(self) -> float:
        """The clock time at which the budget is used up."""
        return self.start + self.seconds

    @property
    def spent(self) -> float:
        """Seconds since the budget started."""
        return self.clock() - self.start

    @property
    def left(self) -> float:
        """Seconds until the budget ends, never negative."""
        return max(0.0, self.end - self.clock())

    def extend_for_compiling(self, seconds: float) -> None:
        """Extend the budget by time spent on compilation, up to `compile_seconds`."""
        extra = min(seconds, self.compile_seconds)
        self.seconds += extra
        self.compile_seconds -= extra


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningProgress:
    """The progress of a measurement: what is being measured, and how much of the budget is spent."""

    doing: str
    """What is being measured, such as "precision bf16"."""
    spent_seconds: float
    budget_seconds: float

    @property
    def message(self) -> str:
        """The progress as one line of text.

        >>> TuningProgress(doing="precision bf16", spent_seconds=12.3, budget_seconds=60).message
        'measuring: precision bf16, 12 of 60 s'
        """
        return f"measuring: {self.doing}, {self.spent_seconds:.0f} of {self.budget_seconds:.0f} s"

    def as_event(self) -> dict[str, object]:
        """Return the fields of a progress event."""
        return {"message": self.message, **asdict(self)}


# Called a few times per second at most. Its time counts against the budget.
ProgressCallback = Callable[[TuningProgress], None]


class ProgressReporter:
    """Reports what is being measured: immediately when it changes, then at intervals."""

    def __init__(self, callback: ProgressCallback | None, budget: Budget) -> None:
        self._callback = callback
        self._budget = budget
        self._doing = ""
        self._reported_at = float("-inf")

    def begin(self, doing: str) -> None:
        """Report the start of a measurement."""
        self._doing = doing
        self._report()

    def tick(self) -> None:
        """Repeat the report if the last one is older than the reporting interval."""
        if self._budget.clock() - self._reported_at >= _MIN_REPORT_SECONDS:
            self._report()

    def _report(self) -> None:
        if self._callback is None or not self._doing:
            return
        self._reported_at = self._budget.clock()
        spent = min(self._budget.spent, self._budget.seconds)
        self._callback(TuningProgress(doing=self._doing, spent_seconds=spent, budget_seconds=self._budget.seconds))
