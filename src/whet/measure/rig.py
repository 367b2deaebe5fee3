"""What can be asked of one workload on one machine? A rig makes real steps, or simulated ones on a clock of its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from whet.base.errors import WhetError
from whet.plan.plan import Plan
from whet.plan.setting import Scalar

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
class Agreement:
    """Whether other settings compute the same as fp32, as far as loss and gradients say."""

    agrees: bool
    loss_error: float
    gradient_error: float
    bound: float


class Prepared(Protocol):
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


class Rig(Protocol):
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

    def agreement(self, settings: Settings, *, seconds: float) -> Agreement:
        """Do these settings compute the same? Raises ProbeFailedError, as `prepare` does."""

    def prepare(self, settings: Settings, *, seconds: float) -> Prepared:
        """Builds, compiles and makes the first steps, at least one; never longer than `seconds` if it can help it.

        Raises ProbeFailedError.
        """


class PlannedRig(Rig, Protocol):
    """A rig that knows the plan it starts from."""

    @property
    def plan(self) -> Plan:
        """The plan by rules alone."""

    @property
    def about(self) -> Mapping[str, Any]:
        """What is measured, as evidence is kept by."""
