"""The interface for timing optimizer steps under different settings, with its time budget and progress reports."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from whet.base.errors import WhetError
from whet.plan.plan import Plan
from whet.plan.setting import Scalar


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Seconds on a rig's clock, counted from when the search began."""

    clock: Callable[[], float]
    start: float
    seconds: float

    @property
    def end(self) -> float:
        """When it is used up, on the clock."""
        return self.start + self.seconds

    @property
    def spent(self) -> float:
        """Seconds since the search began."""
        return self.clock() - self.start

    @property
    def left(self) -> float:
        """Seconds until the end, zero after it."""
        return max(0.0, self.end - self.clock())


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningProgress:
    """One moment of a measurement."""

    doing: str
    """What is tried now, as in "precision bf16"."""
    spent_seconds: float
    budget_seconds: float

    @property
    def words(self) -> str:
        """One line.

        >>> Progress(doing="precision bf16", spent_seconds=12.3, budget_seconds=60).words
        'measuring: precision bf16, 12 of 60 s'
        """
        return f"measuring: {self.doing}, {self.spent_seconds:.0f} of {self.budget_seconds:.0f} s"

    def as_event(self) -> dict[str, object]:
        """For those who are told of events by kind and fields."""
        return {"words": self.words, **asdict(self)}


ProgressCallback = Callable[[TuningProgress], None]
"""Is told how far a measurement is, some times a second at most; what it does takes from the budget."""

_LEAST_SECONDS = 0.25


class ProgressReporter:
    """Tells a watch what is being done, at once, and then that it goes on, now and then."""

    def __init__(self, watch: ProgressCallback | None, budget: Budget) -> None:
        self._watch = watch
        self._budget = budget
        self._doing = ""
        self._told_at = float("-inf")

    def begin(self, doing: str) -> None:
        """Something else is tried from now on."""
        self._doing = doing
        self._tell()

    def again(self) -> None:
        """The same goes on; told of if the last time is a while ago."""
        if self._budget.clock() - self._told_at >= _LEAST_SECONDS:
            self._tell()

    def _tell(self) -> None:
        if self._watch is None or not self._doing:
            return
        self._told_at = self._budget.clock()
        spent = min(self._budget.spent, self._budget.seconds)
        self._watch(TuningProgress(doing=self._doing, spent_seconds=spent, budget_seconds=self._budget.seconds))


Settings = Mapping[str, Scalar]
"""What differs from the rule-based plan, by setting name; the rules decide all else anew (`candidates.planned`)."""

FailureKind = Literal["crash", "oom", "timeout", "error", "refused"]
"""refused: it was not even begun, for a reason that lies in the rig."""


class ProbeFailedError(WhetError):
    """A probe that did not come to its end: that is evidence, and the search goes on."""

    def __init__(self, reason: str, *, kind: FailureKind) -> None:
        super().__init__("a probe failed", got=f"{kind}: {reason}", try_="the settings of the rule-based plan")
        self.reason = reason
        self.kind: FailureKind = kind


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingsAgreement:
    """Whether other settings compute the same as fp32, as far as loss and gradients say."""

    agrees: bool
    loss_error: float
    gradient_error: float
    bound: float


class PreparedStep(Protocol):
    """A workload under some settings, ready to make steps. Two may be alive at the same time, never more."""

    @property
    def preparation_seconds(self) -> float:
        """Building, compiling, first steps: what a run under these settings pays once."""

    @property
    def step_seconds(self) -> float:
        """What the last step of the preparation took: how long the next one will take, roughly."""

    def step(self, index: int) -> float:
        """Seconds of one optimizer step on the index-th fixed global batch, the device having finished.

        Any index from 0 on may be asked for; the same index is the same batch under all settings.
        """

    def peak_bytes(self) -> int | None:
        """The most memory that was in use since the preparation began; None where nothing can tell."""

    def close(self) -> None:
        """Gives everything back. No step follows; what is known about it can still be asked."""


class StepBench(Protocol):
    """One workload on one machine."""

    ends_at: float | None
    """On the clock: nothing is waited for any longer, where a rig can hold that."""

    tick: Callable[[], None] | None
    """Called now and then while something is waited for, where a rig can do that."""

    @property
    def recovery_seconds(self) -> float:
        """What a probe that had to be stopped costs besides its own time, before anything can be prepared again."""

    def clock(self) -> float:
        """Seconds since some instant; everything a rig does takes time on this clock."""

    def predicted_bytes(self, settings: Settings) -> int | None:
        """The memory a step will need, without making one; answers at once, None where nothing is known."""

    def agreement(self, settings: Settings, *, seconds: float) -> SettingsAgreement:
        """Do these settings compute the same? Raises ProbeFailedError, as `prepare` does."""

    def prepare(self, settings: Settings, *, seconds: float) -> PreparedStep:
        """Builds, compiles and makes the first steps, at least one; never longer than `seconds` if it can help it.

        Raises ProbeFailedError.
        """


class PlannedStepBench(StepBench, Protocol):
    """A rig that knows the plan it starts from."""

    @property
    def plan(self) -> Plan:
        """The plan by rules alone."""

    @property
    def about(self) -> Mapping[str, Any]:
        """What is measured, as evidence is kept by."""
