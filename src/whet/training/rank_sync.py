"""Synchronize decisions between ranks: stop signals, checkpoints that are due, rollbacks and NaN losses.

Whatever decides what comes next and is not a pure function of the step (a signal, the clock, a NaN loss that one rank
has read first) is agreed on at the same step by all ranks. How many steps lie between two synchronizations follows from
how long steps take, and is agreed as well.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from whet.distributed.group import RankGroup
from whet.training.callback import Action

SYNC_SECONDS = 0.25
"""How long a request to stop may wait, besides the step that is running."""
MAX_STEPS_BETWEEN = 64
_STOP_WITHOUT_SIGNAL = 0.5
"""Sorts below every signal: where one rank got a signal, its number decides the exit code of all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgreedAction:
    """What all ranks do after a step."""

    action: Action
    is_non_finite: bool = False
    """Whether any rank has read a loss that is NaN or Inf."""
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
        """Whether all ranks synchronize after this step."""
        return step >= self._next_step

    def agree(self, step: int, action: Action, *, is_non_finite: bool, has_failed: bool) -> AgreedAction:
        """Merge the actions of all ranks. Every rank must call it after the same step."""
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
