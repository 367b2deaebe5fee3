"""React to heat, memory pressure and battery power by logging, saving and pausing between steps.

No tensor is used, so sensor readings can change the duration of a run but not its results.
"""

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

from whet.base.units import format_bytes, format_seconds
from whet.device.abstract import AbstractDevice
from whet.device.open import with_simulated_state
from whet.machine.facts import PressureLevel, SystemState
from whet.machine.pressure import ReadSystemState, SystemStateReader
from whet.plan.plan import Plan
from whet.step.step import Outcome
from whet.training.callback import Action, Callback
from whet.training.callbacks.drift import Slowdown, SlowdownDetector
from whet.training.callbacks.event_log import Recorder
from whet.training.progress import State

if TYPE_CHECKING:
    from whet.training.run_context import RunContext

Heat = Literal["cool", "slow", "hot"]
"""The thermal state. "slow": steps take longer, but the sensor reports no heat."""

_THROTTLING = ("heavy", "trapping", "sleeping")
"""Thermal levels at which macOS lowers clock speeds. At "moderate" it may not do so."""


def classify_heat(system_state: SystemState, slowdown: Slowdown | None) -> Heat:
    """Classify the thermal state from a sensor reading and step times. Without a sensor, slow steps count as heat.

    >>> slow = Slowdown(factor=1.3, since_step=7)
    >>> [classify_heat(SystemState(thermal=level), slow) for level in ("nominal", "moderate", None)]
    ['slow', 'hot', 'hot']
    >>> [classify_heat(SystemState(thermal=level), None) for level in ("moderate", "heavy", None)]
    ['cool', 'hot', 'cool']
    """
    if system_state.thermal in _THROTTLING:
        return "hot"
    if slowdown is None:
        return "cool"
    return "slow" if system_state.thermal == "nominal" else "hot"


def describe_heat(heat: Heat, system_state: SystemState, slowdown: Slowdown | None) -> str:
    """Describe the thermal state or the slowdown, and its likely cause."""
    if heat == "cool":
        return "no longer slowed down"
    observed: list[str] = []
    if slowdown is not None:
        observed.append(f"steps take {slowdown.factor:.1f}x as long since step {slowdown.since_step:,}")
    if system_state.thermal is None:
        observed.append("heat, or other programs: no heat sensor can be read here")
    elif heat == "hot":
        observed.append(f"the machine is hot (thermal pressure {system_state.thermal})")
    else:
        observed.append("not heat, by the sensor: other programs, longer samples or swapping")
    if system_state.memory_pressure in ("warn", "critical"):
        observed.append("memory is short")
    if system_state.low_power_mode:
        observed.append("low-power mode is on")
    return "; ".join(observed)


def describe_pressure(level: PressureLevel, system_state: SystemState) -> str:
    """Describe the memory pressure and the amount of memory left."""
    if level == "normal":
        return "memory is no longer short"
    left, swapped = system_state.memory_available_bytes, system_state.swap_used_bytes
    facts = [] if left is None else [f"{format_bytes(left)} left"]
    facts += [f"{format_bytes(swapped)} swapped out"] if swapped else []
    details = f" ({', '.join(facts)})" if facts else ""
    if level == "warn":
        return f"memory is short{details}: close other programs"
    return f"memory is nearly used up{details}: the system may end programs, this one too"


Power = tuple[bool, bool]
"""Whether the machine runs on battery, and whether low-power mode is on."""


def classify_power(system_state: SystemState, before: Power) -> Power:
    """Return the power state. An unknown value keeps its previous state."""
    source, saves = system_state.power_source, system_state.low_power_mode
    return before[0] if source is None else source == "battery", before[1] if saves is None else saves


def describe_power(power: Power) -> str:
    on_battery, saves = power
    where = "on battery: the run may be slower, and ends with the battery" if on_battery else "on mains"
    return f"{where}; low-power mode is on, which slows the GPU" if saves else where


class SensorThread:
    """A thread that calls `reader` every few seconds inside the `with` block and passes each result to `take`.

    Data workers may be forked at any time, so the thread must not hold a lock that a forked process needs.
    """

    def __init__(self, reader: ReadSystemState, take: Callable[[SystemState], None], *, every_seconds: float) -> None:
        self._reader = reader
        self._take = take
        self._every_seconds = every_seconds
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="whet-sensors", daemon=True)

    def __enter__(self) -> Self:
        self._pid = os.getpid()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # A forked child does not have this thread, and its copy of the event may be locked forever.
        if os.getpid() == self._pid:
            self._is_over.set()
            self._thread.join()

    def _watch(self) -> None:
        while True:
            try:
                system_state = self._reader()
                self._take(system_state if isinstance(system_state, SystemState) else SystemState())
            except Exception:
                # A failing sensor must not end a run; treat the failure as an empty reading.
                self._take(SystemState())
            if self._is_over.wait(self._every_seconds):
                return


READ_EVERY_SECONDS = 5.0
"""Seconds between sensor readings."""
DEBOUNCE_SECONDS = 30.0
"""Minimum number of seconds between state changes, so that a sensor near a threshold does not cause many events."""

INITIAL_REST_SHARE, REST_SHARE_STEP, MAX_REST_SHARE = 0.2, 0.1, 0.6
"""on_heat=slow_down: the initial fraction of time to rest, the step by which it changes, and its maximum."""
MIN_WORK_SECONDS = 1.0
"""on_heat=slow_down: minimum seconds between rests. Each rest waits for the device, so not every step can rest."""

REST_SECONDS_WITHOUT_SENSOR = 120.0
"""on_heat=pause: the length of a pause in seconds if there is no sensor."""
MAX_REST_SECONDS = 900.0
"""on_heat=pause: the maximum length of a pause in seconds."""
MIN_SECONDS_BETWEEN_PAUSES = 60.0
"""on_heat=pause: minimum seconds of training between pauses, for a machine that never cools down."""

PRESSURE_SAVE_SECONDS = 300.0
"""Minimum seconds between the extra checkpoints that are written while memory is almost exhausted."""
_SLEEP_SECONDS = 0.2
"""Seconds between checks for a stop request during a rest."""

T = TypeVar("T")


class _Debounced(Generic[T]):
    """A value that can change at most once every DEBOUNCE_SECONDS."""

    def __init__(self, value: T) -> None:
        self.value = value
        self._changed_at = float("-inf")

    def change(self, wanted: T, *, now: float) -> bool:
        """Change to the wanted value if enough time has passed. Return whether the value changed."""
        if wanted == self.value or now - self._changed_at < DEBOUNCE_SECONDS:
            return False
        self.value = wanted
        self.hold(now=now)
        return True

    def hold(self, *, now: float) -> None:
        """Prevent the value from changing for the next DEBOUNCE_SECONDS."""
        self._changed_at = now


class ThermalPolicy(Callback):
    """A callback that watches sensors and step times, and warns, slows down or pauses between steps (`on_heat`)."""

    every_seconds = 0.1

    def __init__(
        self,
        plan: Plan,
        log: Recorder,
        device: AbstractDevice,
        *,
        reader: ReadSystemState | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.should_stop: Callable[[], bool] = lambda: False
        """Returns whether the run is about to end, which also ends a rest."""
        self._policy = plan.on_heat
        self._log, self._device = log, device
        self._reader, self._clock, self._sleep = reader or _sensors(), clock, sleep
        self._slowdowns = SlowdownDetector()
        self.system_state = SystemState()
        """The latest sensor readings."""
        self._has_new_readings = False
        self._heat = _Debounced[Heat]("cool")
        self._pressure = _Debounced[PressureLevel]("normal")
        self._power = _Debounced[Power]((False, False))
        self._rest_share = _Debounced[float](0.0)
        self._saved_at = float("-inf")
        self._may_pause_at = float("-inf")
        self._is_pause_due = False
        self._worked_since = clock()
        self._is_cool_reported = False

    @property
    def heat(self) -> Heat:
        """The current thermal state of the machine."""
        return self._heat.value

    # --- callback ----------------------------------------------------------------------------------------------------

    def on_start(self, run: "RunContext") -> None:
        self.should_stop = lambda: run.is_stop_requested or run.state.is_finished
        self._log.on_step_times = self.take_step_times
        run.exit_stack.enter_context(SensorThread(self._reader, self.take, every_seconds=READ_EVERY_SECONDS))

    def after_step(self, state: State, outcome: Outcome) -> Action:  # noqa: ARG002
        """Rest if on_heat=slow_down requires it, then act on new sensor readings."""
        if self._is_pause_due:
            # An earlier call requested a checkpoint before this pause, and the loop has written it by now.
            self._is_pause_due = False
            self._pause(state.step)
        elif self._rest_share.value > 0:
            self._rest_a_share()
        if not self._has_new_readings:
            return Action.NONE
        self._has_new_readings = False
        return self._act(state.step)

    # --- sensor readings ---------------------------------------------------------------------------------------------

    def take(self, system_state: SystemState) -> None:
        """Store the latest sensor reading. Thread-safe."""
        self.system_state = system_state
        self._has_new_readings = True

    def take_step_times(self, steps: list[tuple[int, float]]) -> None:
        """Record the step times in seconds on the device's clock."""
        was_slow = self._slowdowns.verdict is not None
        for step, seconds in steps:
            self._slowdowns.observe(step, seconds)
        if (self._slowdowns.verdict is not None) != was_slow:
            self._has_new_readings = True

    # --- reactions ---------------------------------------------------------------------------------------------------

    def _act(self, step: int) -> Action:
        now, system_state, slowdown = self._clock(), self.system_state, self._slowdowns.verdict
        action = Action.NONE
        power = classify_power(system_state, self._power.value)
        if self._power.change(power, now=now):
            self._log.event("throttle", step=step, cause="power", reason=describe_power(power))
        level = system_state.memory_pressure or self._pressure.value
        if self._pressure.change(level, now=now):
            self._log.event("pressure", step=step, level=level, reason=describe_pressure(level, system_state))
        if level == "critical" and now - self._saved_at >= PRESSURE_SAVE_SECONDS:
            # Not debounced: the system may kill the process at any moment without a warning.
            self._saved_at = now
            action = Action.SAVE
        heat = classify_heat(system_state, slowdown)
        if heat == "slow" and self._heat.value == "hot":
            # The sensor reacts faster than the window of step times, so trust it and start a new window.
            heat = "cool"
        if self._heat.change(heat, now=now):
            if heat == "cool":
                self._slowdowns.forget_recent()
            reason = describe_heat(heat, system_state, slowdown)
            self._log_heat(step, reason if heat != "hot" else f"{reason}{self._policy_note()}")
        elif not self._is_cool_reported and heat == "cool" and system_state.thermal is not None:
            self._is_cool_reported = True
            self._log.notify("sensors", heat=heat)
        if self._policy == "slow_down":
            self._adapt_rest_share(now)
        elif self._policy == "pause" and self._heat.value == "hot" and now >= self._may_pause_at:
            self._is_pause_due = not self.should_stop()
            action = Action.SAVE if self._is_pause_due else action
        return action

    def _policy_note(self) -> str:
        if self._policy == "slow_down":
            return "; rests part of the time between steps"
        return "; saved, and paused until it is cool" if self._policy == "pause" else ""

    def _log_heat(self, step: int, reason: str, **fields: Any) -> None:
        slowdown = self._slowdowns.verdict
        observed = {} if slowdown is None else {"factor": slowdown.factor, "since_step": slowdown.since_step}
        thermal = {} if self.system_state.thermal is None else {"thermal": self.system_state.thermal}
        heat = {"cause": "heat", "state": self._heat.value}
        self._log.event("throttle", step=step, reason=reason, **heat, **observed, **thermal, **fields)

    def _adapt_rest_share(self, now: float) -> None:
        """Increase the fraction of time to rest while the machine is hot, and decrease it otherwise.

        If no sensor can confirm the heat, the fraction does not exceed its initial value.
        """
        has_sensor = self.system_state.thermal is not None
        share, largest = self._rest_share.value, MAX_REST_SHARE if has_sensor else INITIAL_REST_SHARE
        if self._heat.value == "hot":
            wanted = min(largest, max(INITIAL_REST_SHARE, share + REST_SHARE_STEP)) if share else INITIAL_REST_SHARE
        else:
            wanted = share - REST_SHARE_STEP if share > INITIAL_REST_SHARE else 0.0
        if self._rest_share.change(round(wanted, 3), now=now):
            self._worked_since = now

    def _rest_a_share(self) -> None:
        if self._clock() - self._worked_since < MIN_WORK_SECONDS:
            return
        # Wait for the device first; otherwise it would work on queued kernels during the rest.
        self._device.sync()
        worked = min(self._clock() - self._worked_since, MIN_SECONDS_BETWEEN_PAUSES)
        share = self._rest_share.value
        self._rest(lambda rested: rested >= worked * share / (1 - share))
        self._worked_since = self._clock()

    def _pause(self, step: int) -> None:
        self._device.sync()
        rested = self._rest(self._is_rested)
        now = self._clock()
        self._may_pause_at = now + MIN_SECONDS_BETWEEN_PAUSES
        # Step times from before the pause no longer describe the machine.
        self._slowdowns.forget_recent()
        heat = classify_heat(self.system_state, None)
        self._heat.change(heat, now=now)
        self._heat.hold(now=now)
        cool = "resumed" if self.system_state.thermal is None else "cool again"
        result = cool if heat == "cool" else "still hot"
        self._log_heat(step, f"{result} after a rest of {format_seconds(rested)}", cooldown_seconds=rested)

    def _is_rested(self, rested: float) -> bool:
        thermal = self.system_state.thermal
        if thermal is None:
            return rested >= REST_SECONDS_WITHOUT_SENSOR
        return rested >= MAX_REST_SECONDS or (thermal == "nominal" and rested >= DEBOUNCE_SECONDS)

    def _rest(self, is_enough: Callable[[float], bool]) -> float:
        """Sleep until `is_enough` returns True or a stop is requested. Return the seconds slept."""
        began = self._clock()
        while not is_enough(self._clock() - began) and not self.should_stop():
            self._sleep(_SLEEP_SECONDS)
        rested = self._clock() - began
        self._log.add_seconds("cooldown", rested)
        return rested


def _sensors() -> ReadSystemState:
    """Return a function that reads the sensors of this machine, including the simulated sensors of a virtual Mac."""
    read = SystemStateReader()
    return lambda: with_simulated_state(read())
