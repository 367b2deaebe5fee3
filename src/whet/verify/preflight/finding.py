"""What is a finding? What is wrong, how bad it is, on which line, how often, and what to try."""

import linecache
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whet.base.record import Record
from whet.verify.lines import Line

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


class Place(Record):
    """A line of source that is neither torch's nor whet's."""

    file: str
    line: int
    function: str = ""
    code: str = ""
    is_backward: bool = False
    """Whether it is not this line that did it, but its backward pass."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (", in its backward pass" if self.is_backward else "")


def as_place(line: Line, *, is_backward: bool = False) -> Place:
    """The line with its code, its file as short as it can be named from here."""
    file, number, function = line
    path, here = Path(file).absolute(), Path.cwd()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    return Place(
        file=str(shown),
        line=number,
        function=function,
        code=linecache.getline(file, number).strip(),
        is_backward=is_backward,
    )


class Finding(Record):
    id: str
    """What kind of finding it is, such as missing-operator."""
    severity: Severity
    what: str
    try_: str
    place: Place | None = None
    during: str = ""
    """The part of a step in which it was seen, where no line of yours was at work."""
    count: int = 1
    """How often in one step."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a watcher says about one call; the place and the count are found by the one who asked."""

    id: str
    severity: Severity
    what: str
    try_: str
