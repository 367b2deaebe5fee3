"""Synchronize decisions between ranks: stop signals, checkpoints that are due, rollbacks and NaN losses.

A decision that depends on more than the step (a signal, the clock, a NaN loss that one rank reads first) must take
effect at the same step on all ranks. The number of steps between synchronizations is derived from the step time and is
the same on all ranks.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from whet.distributed.group import RankGroup
from whet.training.callback import Action

SYNC_SECONDS = 0.25
"""Target number of seconds between synchronizations, which delay a stop request beyond the current step."""
MAX_STEPS_BETWEEN = 64
"""Maximum number of steps between synchronizations."""
_STOP_WITHOUT_SIGNAL = 0.5
"""The code of a stop without a signal.

It is lower than every signal number, so a signal on any rank wins the max-reduce and sets the exit code of all ranks.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgreedAction:
    """The actions of all ranks after a step, merged."""

    action: Action
    is_non_finite: bool = False
    """Whether any rank has read a NaN or Inf loss."""
    has_failed: bool = False
    """Whether a callback has failed on any rank."""


class RankSync:
    """Synchronizes several ranks every few steps."""

    def __init__(self, group: RankGroup, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._group = group
        self._clock = clock
        self._synced_at = clock()
        self._synced_step: int | None = None
        self._next_step = 0

    def is_due(self, step: int) -> bool:
        """Return whether a synchronization of all ranks is due after this step."""
        return step >= self._next_step

    def agree(self, step: int, action: Action, *, is_non_finite: bool, has_failed: bool) -> AgreedAction:
        """Merge the actions of all ranks. Every rank must call this after the same step."""
        # Use one max-reduce for everything, including the elapsed time: all ranks must arrive at the same next step.
        mine = (
            float(action.signal or (_STOP_WITHOUT_SIGNAL if action.stop else 0.0)),
            float(action.save),
            float(action.rollback is not None),
            float(is_non_finite),
            float(has_failed),
            self._clock() - self._synced_at,
        )
        stop, save, rollback, non_finite, failed, seconds = self._group.all_reduce_max(mine)
        self._schedule_next(step, seconds=seconds)
        merged = replace(action, save=int(save), signal=int(stop))
        if stop and action.stop is None:
            merged = replace(merged, stop="another rank asked to stop")
        if rollback and action.rollback is None:
            merged = replace(merged, rollback="another rank asked to roll back")
        return AgreedAction(action=merged, is_non_finite=bool(non_finite), has_failed=bool(failed))

    def _schedule_next(self, step: int, *, seconds: float) -> None:
        steps = 1 if self._synced_step is None else max(1, step - self._synced_step)
        stride = int(SYNC_SECONDS * steps / max(seconds, 1e-9))
        self._synced_at, self._synced_step = self._clock(), step
        self._next_step = step + max(1, min(MAX_STEPS_BETWEEN, stride))
