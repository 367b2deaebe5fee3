"""How far is a run whose log would take a minute to read? Its first and last lines tell enough for a list."""

from dataclasses import dataclass
from pathlib import Path

from whet.run.event import SITTINGS, Event, read_line
from whet.run.folder import EVENTS_FILE
from whet.run.plain_file import open_plain

_HEAD_BYTES = 64 * 1024
_TAIL_BYTES = 1024**2


@dataclass(frozen=True, slots=True)
class Ends:
    """The first and the last events of a log."""

    events: tuple[Event, ...]
    position: int
    """Behind the last whole line."""

    def last(self, *kinds: str) -> Event | None:
        """The newest of these kinds, as far as can be seen from the ends."""
        return next((event for event in reversed(self.events) if event.kind in kinds), None)

    def told(self, name: str) -> object:
        """What the newest start or resume that says anything about it says."""
        values = (event.get(name) for event in reversed(self.events) if event.kind in SITTINGS)
        return next((value for value in values if value is not None), None)


def read_ends(folder: Path) -> Ends:
    """Reads a megabyte at most, whatever the size of the log."""
    with open_plain(folder / EVENTS_FILE) as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = file.read(min(_HEAD_BYTES, size))
        begin = file.seek(max(len(head), size - _TAIL_BYTES))
        tail = file.read(size - begin)
    whole = tail[: tail.rfind(b"\n") + 1]
    lines = [*head.split(b"\n")[:-1], *whole.split(b"\n")[1:]]
    events = tuple(event for line in lines if line and (event := read_line(line)) is not None)
    return Ends(events=events, position=begin + len(whole))
