"""How long had a run been at work at some moment? The time between two sittings does not count."""

from bisect import bisect_right
from collections.abc import Sequence

from whet.base.record import Record
from whet.run.event import SITTINGS
from whet.run.events import History


class Sitting(Record):
    """One process at work without a break."""

    started: float
    """Unix seconds."""
    ended: float
    step: int
    """The step it went on from."""
    begins_at: float
    """Seconds of work done before it."""


class WorkClock:
    """Turns unix seconds into seconds of work."""

    def __init__(self, sittings: Sequence[Sitting]) -> None:
        self._sittings = sittings
        self._starts = [sitting.started for sitting in sittings]

    def at(self, time: float) -> float:
        """The seconds of work done at that time; between two sittings: all of the earlier one."""
        if not self._sittings:
            return 0.0
        sitting = self._sittings[max(0, bisect_right(self._starts, time) - 1)]
        return sitting.begins_at + min(max(0.0, time - sitting.started), max(0.0, sitting.ended - sitting.started))


def sittings(history: History) -> tuple[Sitting, ...]:
    """The sittings of a run in their order, from the places where its log says that one began."""
    found: list[list[float]] = []
    for block in history.layout.blocks:
        if not block.kinds:
            continue
        if not found or not SITTINGS.isdisjoint(block.kinds):
            found.append([block.first_time, block.last_time, block.first_step])
        found[-1][1] = block.last_time
    made: list[Sitting] = []
    work = 0.0
    for started, ended, step in found:
        made.append(Sitting(started=started, ended=ended, step=int(step), begins_at=work))
        work += max(0.0, ended - started)
    return tuple(made)
