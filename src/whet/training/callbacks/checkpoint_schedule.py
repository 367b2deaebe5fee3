"""Checkpoint scheduling: balances the work lost in a failure against the cost of saving."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from whet.distributed.group import RankGroup
from whet.plan.plan import Plan
from whet.training.callback import SAVE_NOW, SAVE_WHEN_IDLE, Action, Callback
from whet.training.progress import State

if TYPE_CHECKING:
    from whet.step.step import Outcome
    from whet.training.callbacks.event_log import Recorder
    from whet.training.checkpointer import Checkpointer

MAX_SAVE_SHARE = 0.01
"""Maximum fraction of time spent on saving, unless the user sets the interval."""
MEAN_SECONDS_BETWEEN_FAILURES = 24 * 3600.0
"""The mean time between failures, in seconds, that Young's formula assumes."""
FIRST_SECONDS = 30.0
"""The first interval of a session. Each save doubles it, so that a young run that is killed loses little too."""
RETRY_SECONDS = 60.0
"""Maximum number of seconds before a failed save is tried again."""
_BASELINE_STEPS = 64
"""Number of steps without a concurrent write from which the usual step time is determined."""
_MIN_BACKGROUND_SAVES = 2
"""Number of background writes before a blocking write is considered."""
_SLOW_SHARE = 0.3
"""A blocking write is tried if background writes slow training down by more than this fraction of their duration."""

SaveDue = Literal["no", "time", "requested"]
"""Why a checkpoint is due. "time": by the clock; may be late. "requested": at a step or epoch the user chose."""


class CheckpointSchedule(Callback):
    """A callback that requests checkpoints by the clock, every N steps or epochs, and after a new best evaluation."""

    def __init__(self, checkpointer: "Checkpointer", log: "Recorder", group: RankGroup) -> None:
        self._checkpointer = checkpointer
        self._log = log
        self._is_rank_zero = group.is_rank_zero

    def after_step(self, state: State, outcome: "Outcome") -> Action:  # noqa: ARG002
        checkpointer = self._checkpointer
        checkpointer.step_times.tick(is_writing=checkpointer.is_writing, overhead=self._log.overhead_seconds)
        if checkpointer.is_writing:
            checkpointer.collect(wait=False)
        is_epoch_end = state.batch is not None and state.batch.is_last_of_epoch
        due = checkpointer.interval.is_due(state.step, epochs_done=state.epoch if is_epoch_end else None)
        if due == "requested":
            return Action(save=SAVE_NOW, on_all_ranks=True)
        # Clocks differ between ranks, so rank 0 decides for all of them.
        return Action(save=SAVE_WHEN_IDLE) if due == "time" and self._is_rank_zero else Action.NONE

    def on_evaluate(self, state: State, metrics: Mapping[str, float]) -> Action:  # noqa: ARG002
        # Save at this step on all ranks: by the next synchronization, the weights would be a few steps newer.
        is_best = state.best_step == state.step and state.num_worse == 0
        return Action(save=SAVE_NOW, on_all_ranks=True) if is_best else Action.NONE


def best_interval(cost: float, *, least: float) -> float:
    """Return the optimal number of seconds, but at least `least`, between saves that take `cost` seconds each.

    Young's formula minimizes lost work plus saving time: sqrt(2 * cost * mean time between failures). Saving takes at
    most 1 % of the time.

    >>> round(best_interval(0.2, least=60)), round(best_interval(0.2, least=300)), round(best_interval(20, least=300))
    (186, 300, 2000)
    """
    return max(least, math.sqrt(2 * cost * MEAN_SECONDS_BETWEEN_FAILURES), cost / MAX_SAVE_SHARE)


class SaveInterval:
    """The rule for when a checkpoint is due, which adapts to the measured cost of saving."""

    def __init__(self, plan: Plan, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps = plan.checkpoint_steps
        self._epochs = plan.checkpoint_epochs
        self._is_fixed = plan.settings["checkpoint_minutes"].source == "you"
        self._least = plan.checkpoint_minutes * 60.0
        self._clock = clock
        self._cost: float | None = None
        """The cost of the last save in seconds of training; None before the first one."""
        self._num_intervals = 0
        self._due_at = clock() + self.interval

    @property
    def interval(self) -> float:
        """The current interval between saves in seconds."""
        if self._is_fixed:
            return self._least
        first = FIRST_SECONDS * 2.0 ** max(0, min(self._num_intervals, 20) - 1)
        if self._cost is None:
            return min(self._least, first)
        return max(min(best_interval(self._cost, least=self._least), first), self._cost / MAX_SAVE_SHARE)

    def is_due(self, step: int, *, epochs_done: int | None) -> SaveDue:
        """Return whether a checkpoint is due after this step. `epochs_done` is None unless the step ended an epoch."""
        if isinstance(self._steps, int) and step % self._steps == 0:
            return "requested"
        if isinstance(self._epochs, int) and epochs_done is not None and epochs_done % self._epochs == 0:
            return "requested"
        return "time" if self._clock() >= self._due_at else "no"

    def restart(self) -> None:
        """Restart the interval, after a save has begun or was skipped because another one is still running."""
        self._num_intervals += 1
        self._due_at = self._clock() + self.interval

    def learn(self, cost: float) -> None:
        """Adapt the interval to the cost of a save in seconds of training, unless the user set the interval."""
        began = self._due_at - self.interval
        self._cost = cost
        self._due_at = began + self.interval

    def retry_after(self, step: int) -> str:
        """Schedule another attempt after a failed save. Return a description of when it takes place, for the log."""
        wait = min(RETRY_SECONDS, self.interval)
        self._due_at = self._clock() + wait
        when = f"in {wait:.0f} s"
        if isinstance(self._steps, int):
            when += f" or after step {(step // self._steps + 1) * self._steps:,}"
        return when


class WriteMode:
    """The choice between background and blocking writes, based on their measured cost.

    If training keeps all cores busy, a background write can cost more time than a blocking one.
    """

    def __init__(self) -> None:
        self._least: dict[bool, float] = {}
        """The lowest cost of each mode in seconds per byte.

        Using the minimum ignores delays caused by other programs.
        """
        self._num_background = 0
        self._share = 0.0

    @property
    def is_background(self) -> bool:
        """Whether the next checkpoint should be written in the background."""
        if self._num_background < _MIN_BACKGROUND_SAVES:
            return True
        if False not in self._least:
            # Try a blocking write only if background writes slowed training down considerably.
            return self._share < _SLOW_SHARE
        return self._least[True] <= self._least[False]

    def learn(self, *, is_background: bool, cost: float, seconds: float, num_bytes: int) -> None:
        """Record the seconds of training that a save cost and the seconds that the write took."""
        per_byte = cost / max(1, num_bytes)
        self._least[is_background] = min(per_byte, self._least.get(is_background, per_byte))
        if is_background:
            self._num_background += 1
            share = cost / max(seconds, 1e-9)
            self._share = share if self._num_background == 1 else min(share, self._share)


class StepTimes:
    """Step times with and without a background write, which show how much the write slows training down."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._usual: deque[float] = deque(maxlen=_BASELINE_STEPS)
        self._last: float | None = None
        self._overhead = 0.0
        self._busy_seconds, self._busy_steps = 0.0, 0

    def tick(self, *, is_writing: bool, overhead: float) -> None:
        """Record the end of a step. `overhead` is the total number of seconds spent on evaluations and saves so far.

        The step in which a write ends counts as slowed down, because the result of the write is collected after the
        step.
        """
        now = self._clock()
        if self._last is not None:
            seconds = now - self._last - (overhead - self._overhead)
            if is_writing:
                self._busy_seconds += seconds
                self._busy_steps += 1
            else:
                self._usual.append(seconds)
        self._last, self._overhead = now, overhead

    def slowed(self) -> float:
        """Return the seconds by which a write has lengthened the steps since the last call; 0 without a baseline."""
        seconds, steps = self._busy_seconds, self._busy_steps
        self._busy_seconds, self._busy_steps = 0.0, 0
        return max(0.0, seconds - steps * statistics.median(self._usual)) if self._usual and steps else 0.0
