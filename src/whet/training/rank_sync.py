"""Synchronize decisions between ranks: stop signals, checkpoints that are due, and NaN losses."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from whet.distributed.group import RankGroup
from whet.training.callbacks.checkpoint_schedule import SaveDue
from whet.training.checkpointer import Checkpointer

SYNC_SECONDS = 0.25
"""How long a request to stop may wait, besides the step that is under way."""
MAX_STEPS_BETWEEN = 64
_DUE_LEVELS: tuple[SaveDue, ...] = ("no", "time", "asked")


@dataclass(frozen=True, kw_only=True, slots=True)
class AgreedAction:
    """What holds for all processes after a step."""

    signal: int | None
    """Why to stop, if anybody was asked to."""
    due: SaveDue
    """Whether anybody wants a checkpoint."""
    is_broken: bool
    """Whether anybody has read a loss that is no number."""


class RankSync:
    """Meets the other processes every few steps; alone, after every step and without a cost."""

    def __init__(
        self, group: RankGroup, keeper: Checkpointer | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._group = group
        self._keeper = keeper
        self._is_alone = group.is_alone
        self._clock = clock
        self._met_at = clock()
        self._met_step: int | None = None
        self._next_step = 0
        self._is_save_wanted = False

    def ask_to_save(self) -> None:
        """A checkpoint for the sake of this process, when all meet."""
        self._is_save_wanted = True

    def due_here(self, step: int, *, epochs_done: int | None) -> SaveDue:
        """Whether this process wants a checkpoint after a step. Call it after each one."""
        due: SaveDue = "no" if self._keeper is None else self._keeper.is_due(step, epochs_done=epochs_done)
        if due == "time" and not self._group.is_first:
            # By the clock of the first process alone.
            due = "no"
        if due == "no" and self._is_save_wanted:
            self._is_save_wanted = False
            return "time"
        return due

    def is_due(self, step: int) -> bool:
        """Whether all meet after this step."""
        return self._is_alone or step >= self._next_step

    def meet(self, step: int, *, signal: int | None, due: SaveDue, is_broken: bool) -> AgreedAction:
        """Tells the others, and is told."""
        if self._is_alone:
            return AgreedAction(signal=signal, due=due, is_broken=is_broken)
        told = _DUE_LEVELS.index(due)
        passed = self._clock() - self._met_at
        found = self._group.most([float(signal or 0), float(told), float(is_broken), passed])
        self._plan_next(step, seconds=found[3])
        return AgreedAction(signal=int(found[0]) or None, due=_DUE_LEVELS[int(found[1])], is_broken=bool(found[2]))

    def _plan_next(self, step: int, *, seconds: float) -> None:
        steps = 1 if self._met_step is None else max(1, step - self._met_step)
        stride = int(SYNC_SECONDS * steps / max(seconds, 1e-9))
        self._met_at, self._met_step = self._clock(), step
        self._next_step = step + max(1, min(MAX_STEPS_BETWEEN, stride))
