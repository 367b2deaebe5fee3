"""Release memory that the device's driver holds but no tensor needs, and suggest using fewer shapes.

MPS compiles a graph and keeps buffers for each combination of operator and shapes. With varying shapes, the driver can
reach ten times the memory of the tensors within a few steps, and the machine starts to swap
(kyutai-labs/pocket-tts#255).
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from whet.base.units import GB, format_bytes, format_seconds
from whet.step.step import Outcome
from whet.training.callback import Action, Callback
from whet.training.progress import State

if TYPE_CHECKING:
    from whet.training.run_context import RunContext

CHECK_EVERY = 2
"""Number of steps between two readings of the memory counters. Reading them does not wait for the device."""
MAX_RATIO, SLACK_BYTES = 3.0, GB
"""The driver may hold this many times the peak memory of the tensors, plus this many bytes."""
MAX_TIME_SHARE = 0.05
"""Maximum fraction of the time that emptying the cache may take."""
MANY_SHAPES = 64
"""Number of micro-batch shapes from which a warning is logged. A column with bucketed lengths has twelve."""


class DeviceCache(Callback):
    """A callback that empties the device's cache when the driver holds far more memory than the tensors need.

    It is active if the plan has empty_cache="on".
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._not_before = 0.0
        self._has_warned_of_shapes = False
        self._num_emptied = 0
        self._emptied: tuple[float, float, str] | None = None
        """When the cache was emptied, the seconds of the step before it, and the message; None after the next step."""
        self._step_seconds = 0.0
        self._last_step_at: float | None = None

    def on_start(self, run: "RunContext") -> None:
        self._run = run

    def after_step(self, state: State, outcome: Outcome) -> Action:  # noqa: ARG002
        now = self._clock()
        if self._emptied is not None:
            self._report_cost(state.step, now)
        elif self._last_step_at is not None:
            self._step_seconds = now - self._last_step_at
        self._last_step_at = now
        if state.step % CHECK_EVERY == 0:
            self._check(state.step, now)
        return Action.NONE

    def _check(self, step: int, now: float) -> None:
        num_shapes = len(self._run.executor.splitting.shapes)
        if num_shapes >= MANY_SHAPES and not self._has_warned_of_shapes:
            self._has_warned_of_shapes = True
            self._warn(step, f"{num_shapes} shapes of micro-batches in {step:,} steps: {_FEW_SHAPES}")
        usage = self._run.device.memory.usage()
        if usage.reserved is None or now < self._not_before:
            return
        needed = max(usage.peak or 0, usage.allocated or 0)
        if usage.reserved <= MAX_RATIO * needed + SLACK_BYTES:
            return
        self._run.device.memory.empty_cache()
        done, left = self._clock(), self._run.device.memory.usage().reserved or 0
        message = (
            f"the GPU's driver held {format_bytes(usage.reserved)} beside {format_bytes(needed)} that tensors need at "
            f"most; its cache was emptied in {format_seconds(done - now)}, which returned "
            f"{format_bytes(max(0, usage.reserved - left))}"
        )
        self._emptied = done, self._step_seconds, message
        self._num_emptied += 1
        self._not_before = done + (done - now) / MAX_TIME_SHARE
        self._last_step_at = done

    def _report_cost(self, step: int, now: float) -> None:
        """Log the cost of emptying the cache: the next step compiles its graphs again."""
        assert self._emptied is not None
        done, before, message = self._emptied
        self._emptied = None
        extra = max(0.0, now - done - before)
        self._not_before += extra / MAX_TIME_SHARE
        # If memory keeps growing, the cache is emptied every few steps. Logging the 1st, 2nd, 4th, 8th time is enough.
        count = self._num_emptied
        if count & (count - 1):
            return
        times = f" ({count} times so far)" if count > 1 else ""
        advice = (
            f"; {len(self._run.executor.splitting.shapes)} shapes so far: {_FEW_SHAPES}"
            if self._has_many_shapes()
            else ""
        )
        self._warn(step, f"{message}, and the next step took {format_seconds(extra)} longer{times}{advice}")

    def _warn(self, step: int, reason: str) -> None:
        self._run.log.event("warning", step=step, reason=reason, retry="never")

    def _has_many_shapes(self) -> bool:
        return len(self._run.executor.splitting.shapes) >= MANY_SHAPES // 4


_FEW_SHAPES = (
    "MPS compiles a graph and keeps memory for each; pad to few lengths (lengths=bucketed for tokenized samples, "
    "multiples of 64 in your own collate function) and drop or pad the last batch"
)
