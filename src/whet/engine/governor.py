"""What is done when the machine gets hot, or short of memory or power: it is said, saved, and rested between steps.

Nothing here touches a tensor. Whatever the sensors say, the numbers of a run stay the same; only the clock moves.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from whet.base.units import show_seconds
from whet.device.abstract import AbstractDevice
from whet.device.machine_here import as_simulated
from whet.engine.drift import Drift
from whet.engine.recorder import Recorder
from whet.engine.strain import (
    Heat,
    Power,
    heat_words,
    judge_heat,
    judge_power,
    power_words,
    pressure_words,
)
from whet.engine.watching import Watching
from whet.machine.facts import Conditions, PressureLevel
from whet.machine.vitals import Reader, Vitals
from whet.plan.plan import Plan

READ_EVERY_SECONDS = 5.0
HOLD_SECONDS = 30.0
"""Nothing is changed or said more often than this, so that a sensor on the edge does not make a run flutter."""

FIRST_SHARE, SHARE_STEP, LARGEST_SHARE = 0.2, 0.1, 0.6
"""pace: the share of time that is rested at first, how much is added or taken away, and where it ends."""
WORK_SECONDS = 1.0
"""pace: rests are taken about so often; after every step would be a wait for the device in every step."""

UNSEEN_REST_SECONDS = 120.0
"""pause: how long, where no sensor tells when it is enough."""
LONGEST_REST_SECONDS = 900.0
LEAST_WORK_SECONDS = 60.0
"""pause: a machine that never cools down still trains for so long between two pauses."""

SAVE_AGAIN_SECONDS = 300.0
"""While memory is nearly used up, a checkpoint is written at most this often beside the planned ones."""
_SLICE_SECONDS = 0.2
"""How long a rest goes without a look at Ctrl-C."""

T = TypeVar("T")


class _Steady(Generic[T]):
    """A state that changes at most once in HOLD_SECONDS."""

    def __init__(self, value: T) -> None:
        self.value = value
        self._changed_at = float("-inf")

    def change(self, wanted: T, *, now: float) -> bool:
        """Takes the wanted value if it is another one and the time has come; whether it did."""
        if wanted == self.value or now - self._changed_at < HOLD_SECONDS:
            return False
        self.value = wanted
        self.hold(now=now)
        return True

    def hold(self, *, now: float) -> None:
        """Something was said about it: it stays as it is for a while."""
        self._changed_at = now


class Governor:
    """Watches the machine beside a run, and acts between its steps by the plan's `on_heat`."""

    def __init__(
        self,
        plan: Plan,
        recorder: Recorder,
        device: AbstractDevice,
        *,
        reader: Reader | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.save: Callable[[], None] = lambda: None
        """Writes a checkpoint."""
        self.should_stop: Callable[[], bool] = lambda: False
        """Whether somebody wants the run to end, so that no rest may go on."""
        self._policy = plan.value("on_heat")
        self._recorder, self._device = recorder, device
        self._reader, self._clock, self._sleep = reader or _sensors(), clock, sleep
        self._drift = Drift()
        self.conditions = Conditions()
        """What the sensors said last."""
        self._has_news = False
        self._heat = _Steady[Heat]("cool")
        self._pressure = _Steady[PressureLevel]("normal")
        self._power = _Steady[Power]((False, False))
        self._share = _Steady[float](0.0)
        self._saved_at = float("-inf")
        self._may_pause_at = float("-inf")
        self._worked_since = clock()
        self._is_cool_told = False
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        self._recorder.watch = self.saw_steps
        self._closing.enter_context(Watching(self._reader, self.take, every_seconds=READ_EVERY_SECONDS))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._recorder.watch = None
        self._closing.close()

    @property
    def heat(self) -> Heat:
        """What is said of the machine at present."""
        return self._heat.value

    # --- what comes in -----------------------------------------------------------------------------------------------

    def take(self, conditions: Conditions) -> None:
        """Takes a reading; from any thread."""
        self.conditions = conditions
        self._has_news = True

    def saw_steps(self, steps: list[tuple[int, float]]) -> None:
        """Takes the seconds that steps took on the device's clock."""
        was_slow = self._drift.verdict is not None
        for step, seconds in steps:
            self._drift.observe(step, seconds)
        if (self._drift.verdict is not None) != was_slow:
            self._has_news = True

    # --- what is done ------------------------------------------------------------------------------------------------

    def between_steps(self, step: int) -> None:
        """Acts if there is something to act on; two comparisons if not."""
        if self._has_news:
            self._has_news = False
            self._act(step)
        if self._share.value > 0:
            self._rest_a_share()

    def _act(self, step: int) -> None:
        now, conditions, slow_down = self._clock(), self.conditions, self._drift.verdict
        power = judge_power(conditions, self._power.value)
        if self._power.change(power, now=now):
            self._recorder.event("throttle", step=step, about="power", reason=power_words(power))
        level = conditions.memory_pressure or self._pressure.value
        if self._pressure.change(level, now=now):
            self._recorder.event("pressure", step=step, level=level, reason=pressure_words(level, conditions))
        if level == "critical" and now - self._saved_at >= SAVE_AGAIN_SECONDS:
            # Not held back: a process that is killed for its memory is not asked first.
            self._saved_at = now
            self.save()
        heat = judge_heat(conditions, slow_down)
        if heat == "slow" and self._heat.value == "hot":
            # The sensor is faster than the steps, which are judged anew.
            heat = "cool"
        if self._heat.change(heat, now=now):
            if heat == "cool":
                self._drift.forget_recent()
            words = heat_words(heat, conditions, slow_down)
            self._tell_heat(step, words if heat != "hot" else f"{words}{self._promise()}")
        elif not self._is_cool_told and heat == "cool" and conditions.thermal is not None:
            self._is_cool_told = True
            self._recorder.tell("vitals", heat=heat)
        if self._policy == "pace":
            self._adapt_share(now)
        elif self._policy == "pause" and self._heat.value == "hot" and now >= self._may_pause_at:
            self._pause(step)

    def _promise(self) -> str:
        if self._policy == "pace":
            return "; rests a share of the time"
        return "; saved, and paused until it is cool" if self._policy == "pause" else ""

    def _tell_heat(self, step: int, reason: str, **fields: Any) -> None:
        slow_down = self._drift.verdict
        seen = {} if slow_down is None else {"factor": slow_down.factor, "since_step": slow_down.since_step}
        thermal = {} if self.conditions.thermal is None else {"thermal": self.conditions.thermal}
        heat = {"about": "heat", "state": self._heat.value}
        self._recorder.event("throttle", step=step, reason=reason, **heat, **seen, **thermal, **fields)

    def _adapt_share(self, now: float) -> None:
        """More rest while it is hot, less while it is not; without a sensor to confirm the heat, never much."""
        share, largest = self._share.value, LARGEST_SHARE if self.conditions.thermal is not None else FIRST_SHARE
        if self._heat.value == "hot":
            wanted = min(largest, max(FIRST_SHARE, share + SHARE_STEP)) if share else FIRST_SHARE
        else:
            wanted = share - SHARE_STEP if share > FIRST_SHARE else 0.0
        if self._share.change(round(wanted, 3), now=now):
            self._worked_since = now

    def _rest_a_share(self) -> None:
        if self._clock() - self._worked_since < WORK_SECONDS:
            return
        # Otherwise the device would go on with what was asked of it already.
        self._device.sync()
        worked = min(self._clock() - self._worked_since, LEAST_WORK_SECONDS)
        share = self._share.value
        self._rest(lambda rested: rested >= worked * share / (1 - share))
        self._worked_since = self._clock()

    def _pause(self, step: int) -> None:
        if self.should_stop():
            return
        self.save()
        self._device.sync()
        rested = self._rest(self._is_rested)
        now = self._clock()
        self._may_pause_at = now + LEAST_WORK_SECONDS
        # The steps before the pause say nothing about the machine after it.
        self._drift.forget_recent()
        heat = judge_heat(self.conditions, None)
        self._heat.change(heat, now=now)
        self._heat.hold(now=now)
        known = "goes on" if self.conditions.thermal is None else "cool again"
        state = known if heat == "cool" else "still hot"
        self._tell_heat(step, f"{state} after a rest of {show_seconds(rested)}", rested_seconds=rested)

    def _is_rested(self, rested: float) -> bool:
        thermal = self.conditions.thermal
        if thermal is None:
            return rested >= UNSEEN_REST_SECONDS
        return rested >= LONGEST_REST_SECONDS or (thermal == "nominal" and rested >= HOLD_SECONDS)

    def _rest(self, is_enough: Callable[[float], bool]) -> float:
        """Waits between two steps until it is enough or somebody wants to stop; how long it was."""
        began = self._clock()
        while not is_enough(self._clock() - began) and not self.should_stop():
            self._sleep(_SLICE_SECONDS)
        rested = self._clock() - began
        self._recorder.spent("rest", rested)
        return rested


def _sensors() -> Reader:
    """This machine's own; a virtual Mac's where it simulates them."""
    vitals = Vitals()
    return lambda: as_simulated(vitals())
