"""Which rows does a run give, one for each step? Each as soon as it is complete, none twice."""

from collections.abc import Iterator

from whet.report.export.numbers import KINDS, named_numbers, step_of
from whet.report.forward.target import Row
from whet.run.event import SITTINGS, Event


class Rows:
    """Collects events into rows. The newest is held back until a later step shows that nothing more belongs to it."""

    def __init__(self) -> None:
        self._open: Row | None = None
        self._sent = -1
        self.state: str | None = None
        """How the run ended; None while it has not."""

    def take(self, event: Event) -> Iterator[Row]:
        """The rows that are complete now."""
        if event.kind == "end":
            told = event.get("state")
            self.state = told if isinstance(told, str) else "done"
        if event.kind in SITTINGS:
            self.state = None
        if event.kind == "resume" and self._open is not None and self._open.step > event.step:
            # Void now: the run went back behind it, and makes it again.
            self._open = None
        if event.kind not in KINDS:
            return
        step = step_of(event)
        if event.kind == "health" and (self._open is None or self._open.step != step):
            return  # Of a step that was made again: the reading came with the first time.
        if self._open is not None and step > self._open.step:
            yield from self.rest()
        if step > self._sent:
            known = self._open.values if self._open is not None else {}
            self._open = Row(step, event.time, {**known, **named_numbers(event)})

    def rest(self) -> Iterator[Row]:
        """The row that was held back."""
        if self._open is not None:
            self._sent = self._open.step
            yield self._open
            self._open = None
