"""What is new in a run since the last look? A history that is extended by new bytes, never read again as a whole.

    history = LiveHistory(run)
    thin_curves(history, points=400, is_growing=True)
    ...
    news = history.refresh()            # every second, if you like
    if news:
        thin_curves(history, points=400, is_growing=True)

Everything a `History` answers, a `LiveHistory` answers too, as of the last `refresh`.
"""

from dataclasses import dataclass
from pathlib import Path

from whet.run.event import Event
from whet.run.events import History
from whet.run.folder import Run


@dataclass(frozen=True, slots=True)
class News:
    """What a refresh found; false when nothing."""

    events: tuple[Event, ...] = ()
    """New events that are no steps, in the order they were written."""
    num_steps: int = 0
    """How many new step events."""
    resumed_from: int | None = None
    """The run went on from this step: later steps that were shown before are void."""
    is_replaced: bool = False
    """Another file lies there now: everything shown before is void. The events of the new file are not listed."""

    def __bool__(self) -> bool:
        return self != News()


class LiveHistory(History):
    """The events of a run that may still grow."""

    def __init__(self, run: Run | Path) -> None:
        super().__init__(run)
        self._run = run

    def refresh(self) -> News:
        """Takes in what was written since; torn last lines wait until they are whole."""
        before = self.layout.end
        super().__init__(self._run)
        return News() if self.layout.end == before else News(is_replaced=True)
