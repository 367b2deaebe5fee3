"""Which line of yours is at work? The innermost one that is neither torch's nor whet's."""

import sys
from types import FrameType

from whet.base.authors import WHET, author_of

Line = tuple[str, int, str]
"""File, number and function: all that is taken at the time; the code is read when somebody looks."""

_ENDS = frozenset(str(WHET / name) for name in ("step/step.py", "verify/preflight/tracing.py", "verify/subject.py"))
"""Who calls your code: lines further out did not ask for what is seen."""


def line_at_work() -> Line | None:
    """Your line; a library's or a recipe's if none of yours is at work; None if torch alone is."""
    frame: FrameType | None = sys._getframe(1)
    library: Line | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        author = author_of(file)
        if author == "you":
            return file, frame.f_lineno, frame.f_code.co_name
        if file in _ENDS:
            break
        if author in ("library", "recipe") and library is None:
            library = file, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return library
