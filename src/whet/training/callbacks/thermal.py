"""React to heat, memory pressure and battery power: log it, save, and rest between steps."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

from whet.base.units import format_bytes, format_seconds
from whet.device.abstract import AbstractDevice
from whet.device.open import with_simulated_conditions
from whet.machine.facts import Conditions, PressureLevel
from whet.machine.pressure import ConditionsReader, ReadConditions
from whet.plan.plan import Plan
from whet.training.callbacks.drift import Slowdown, SlowdownDetector
from whet.training.callbacks.event_log import Recorder

Heat = Literal["cool", "slow", "hot"]
"""slow: the steps take longer, and a sensor says that it is not heat."""

_THROTTLING = ("heavy", "trapping", "sleeping")
"""Levels at which clocks are lowered; at "moderate" they need not be."""


def classify_heat(conditions: Conditions, slow_down: Slowdown | None) -> Heat:
    """Without a sensor slow steps count as heat: it is what cannot be excluded.

    >>> slow = Slowdown(factor=1.3, since_step=7)
    >>> [judge_heat(Conditions(thermal=level), slow) for level in ("nominal", "moderate", None)]
    ['slow', 'hot', 'hot']
    >>> [judge_heat(Conditions(thermal=level), None) for level in ("moderate", "heavy", None)]
    ['cool', 'hot', 'cool']
    """
    if conditions.thermal in _THROTTLING:
        return "hot"
    if slow_down is None:
        return "cool"
    return "slow" if conditions.thermal == "nominal" else "hot"


def describe_heat(heat: Heat, conditions: Conditions, slow_down: Slowdown | None) -> str:
    """What was seen, and what it may be."""
    if heat == "cool":
        return "no longer slowed down"
    seen: list[str] = []
    if slow_down is not None:
        seen.append(f"steps take {slow_down.factor:.1f}x as long since step {slow_down.since_step:,}")
    if conditions.thermal is None:
        seen.append("heat, or other programs: no heat sensor can be read here")
    elif heat == "hot":
        seen.append(f"the machine is hot (thermal pressure {conditions.thermal})")
    else:
        seen.append("not heat, by the sensor: other programs, longer samples or swapping")
    if conditions.memory_pressure in ("warn", "critical"):
        seen.append("memory is short")
    if conditions.low_power_mode:
        seen.append("low-power mode is on")
    return "; ".join(seen)


def describe_pressure(level: PressureLevel, conditions: Conditions) -> str:
    """How short memory is."""
    if level == "normal":
        return "memory is no longer short"
    left, swapped = conditions.memory_available_bytes, conditions.swap_used_bytes
    facts = [] if left is None else [f"{format_bytes(left)} left"]
    facts += [f"{format_bytes(swapped)} swapped out"] if swapped else []
    told = f" ({', '.join(facts)})" if facts else ""
    if level == "warn":
        return f"memory is short{told}: close other programs"
    return f"memory is nearly used up{told}: the system may end programs, this one too"


Power = tuple[bool, bool]
"""Whether the machine runs on its battery, and whether it saves power."""


def classify_power(conditions: Conditions, before: Power) -> Power:
    """What is unknown is as it was."""
    source, saves = conditions.power_source, conditions.low_power_mode
    return before[0] if source is None else source == "battery", before[1] if saves is None else saves


def describe_power(power: Power) -> str:
    on_battery, saves = power
    where = "on battery: the run may be slower, and ends with the battery" if on_battery else "on mains"
    return f"{where}; low-power mode is on, which slows the GPU" if saves else where


class SensorThread:
    """While entered, calls `reader` every few seconds and hands what it says to `take`, in a thread.

    The thread takes no lock that a forked process could need: data workers may start at any time.
    """

    def __init__(self, reader: ReadConditions, take: Callable[[Conditions], None], *, every_seconds: float) -> None:
        self._reader = reader
        self._take = take
        self._every_seconds = every_seconds
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="whet-vitals", daemon=True)

    def __enter__(self) -> Self:
        self._pid = os.getpid()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # In a forked child the thread does not exist, and its event may have been copied while locked.
        if os.getpid() == self._pid:
            self._is_over.set()
            self._thread.join()

    def _watch(self) -> None:
        while True:
            try:
                found = self._reader()
                self._take(found if isinstance(found, Conditions) else Conditions())
            except Exception:
                # A reader that fails knows nothing; it must not end a run.
                self._take(Conditions())
            if self._is_over.wait(self._every_seconds):
                return


READ_EVERY_SECONDS = 5.0
DEBOUNCE_SECONDS = 30.0
"""Nothing is changed or said more often than this, so that a sensor on the edge does not make a run flutter."""

INITIAL_REST_SHARE, REST_SHARE_STEP, MAX_REST_SHARE = 0.2, 0.1, 0.6
"""pace: the share of time that is rested at first, how much is added or taken away, and where it ends."""
MIN_WORK_SECONDS = 1.0
"""pace: rests are taken about so often; after every step would be a wait for the device in every step."""

REST_SECONDS_WITHOUT_SENSOR = 120.0
"""pause: how long, where no sensor tells when it is enough."""
MAX_REST_SECONDS = 900.0
MIN_SECONDS_BETWEEN_PAUSES = 60.0
"""pause: a machine that never cools down still trains for so long between two pauses."""

PRESSURE_SAVE_SECONDS = 300.0
"""While memory is nearly used up, a checkpoint is written at most this often beside the planned ones."""
_SLEEP_SECONDS = 0.2
"""How long a rest goes without a look at Ctrl-C."""

T = TypeVar("T")


class _Debounced(Generic[T]):
    """A state that changes at most once in HOLD_SECONDS."""

    def __init__(self, value: T) -> None:
        self.value = value
        self._changed_at = float("-inf")

    def change(self, wanted: T, *, now: float) -> bool:
        """Takes the wanted value if it is another one and the time has come; whether it did."""
        if wanted == self.value or now - self._changed_at < DEBOUNCE_SECONDS:
            return False
        self.value = wanted
        self.hold(now=now)
        return True

    def hold(self, *, now: float) -> None:
        """Something was said about it: it stays as it is for a while."""
        self._changed_at = now


class ThermalCare:
    """Watches the machine beside a run, and acts between its steps by the plan's `on_heat`."""

    def __init__(
        self,
        plan: Plan,
        recorder: Recorder,
        device: AbstractDevice,
        *,
        reader: ReadConditions | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.save: Callable[[], None] = lambda: None
        """Writes a checkpoint."""
        self.should_stop: Callable[[], bool] = lambda: False
        """Whether somebody wants the run to end, so that no rest may go on."""
        self._policy = plan.on_heat
        self._recorder, self._device = recorder, device
        self._reader, self._clock, self._sleep = reader or _sensors(), clock, sleep
        self._drift = SlowdownDetector()
        self.conditions = Conditions()
        """What the sensors said last."""
        self._has_news = False
        self._heat = _Debounced[Heat]("cool")
        self._pressure = _Debounced[PressureLevel]("normal")
        self._power = _Debounced[Power]((False, False))
        self._share = _Debounced[float](0.0)
        self._saved_at = float("-inf")
        self._may_pause_at = float("-inf")
        self._worked_since = clock()
        self._is_cool_told = False
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        self._recorder.watch = self.saw_steps
        self._closing.enter_context(SensorThread(self._reader, self.take, every_seconds=READ_EVERY_SECONDS))
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
        power = classify_power(conditions, self._power.value)
        if self._power.change(power, now=now):
            self._recorder.event("throttle", step=step, cause="power", reason=describe_power(power))
        level = conditions.memory_pressure or self._pressure.value
        if self._pressure.change(level, now=now):
            self._recorder.event("pressure", step=step, level=level, reason=describe_pressure(level, conditions))
        if level == "critical" and now - self._saved_at >= PRESSURE_SAVE_SECONDS:
            # Not held back: a process that is killed for its memory is not asked first.
            self._saved_at = now
            self.save()
        heat = classify_heat(conditions, slow_down)
        if heat == "slow" and self._heat.value == "hot":
            # The sensor is faster than the steps, which are judged anew.
            heat = "cool"
        if self._heat.change(heat, now=now):
            if heat == "cool":
                self._drift.forget_recent()
            words = describe_heat(heat, conditions, slow_down)
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
        heat = {"cause": "heat", "state": self._heat.value}
        self._recorder.event("throttle", step=step, reason=reason, **heat, **seen, **thermal, **fields)

    def _adapt_share(self, now: float) -> None:
        """More rest while it is hot, less while it is not; without a sensor to confirm the heat, never much."""
        share, largest = (
            self._share.value,
            MAX_REST_SHARE if self.conditions.thermal is not None else INITIAL_REST_SHARE,
        )
        if self._heat.value == "hot":
            wanted = min(largest, max(INITIAL_REST_SHARE, share + REST_SHARE_STEP)) if share else INITIAL_REST_SHARE
        else:
            wanted = share - REST_SHARE_STEP if share > INITIAL_REST_SHARE else 0.0
        if self._share.change(round(wanted, 3), now=now):
            self._worked_since = now

    def _rest_a_share(self) -> None:
        if self._clock() - self._worked_since < MIN_WORK_SECONDS:
            return
        # Otherwise the device would go on with what was asked of it already.
        self._device.sync()
        worked = min(self._clock() - self._worked_since, MIN_SECONDS_BETWEEN_PAUSES)
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
        self._may_pause_at = now + MIN_SECONDS_BETWEEN_PAUSES
        # The steps before the pause say nothing about the machine after it.
        self._drift.forget_recent()
        heat = classify_heat(self.conditions, None)
        self._heat.change(heat, now=now)
        self._heat.hold(now=now)
        known = "goes on" if self.conditions.thermal is None else "cool again"
        state = known if heat == "cool" else "still hot"
        self._tell_heat(step, f"{state} after a rest of {format_seconds(rested)}", cooldown_seconds=rested)

    def _is_rested(self, rested: float) -> bool:
        thermal = self.conditions.thermal
        if thermal is None:
            return rested >= REST_SECONDS_WITHOUT_SENSOR
        return rested >= MAX_REST_SECONDS or (thermal == "nominal" and rested >= DEBOUNCE_SECONDS)

    def _rest(self, is_enough: Callable[[float], bool]) -> float:
        """Waits between two steps until it is enough or somebody wants to stop; how long it was."""
        began = self._clock()
        while not is_enough(self._clock() - began) and not self.should_stop():
            self._sleep(_SLEEP_SECONDS)
        rested = self._clock() - began
        self._recorder.spent("cooldown", rested)
        return rested


def _sensors() -> ReadConditions:
    """This machine's own; a virtual Mac's where it simulates them."""
    vitals = ConditionsReader()
    return lambda: with_simulated_conditions(vitals())
