"""Which line of yours is at work? The innermost one that is neither torch's nor whet's."""

import linecache
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

from whet.verify.preflight.finding import Place

Line = tuple[str, int, str]
"""File, number and function: all that is taken at the time; the code is read when somebody looks."""

_OURS = Path(__file__).parents[2]
_TORCH = str(Path(torch.__file__).parent)
_STANDARD = sysconfig.get_path("stdlib")
_INSTALLED = ("site-packages", "dist-packages")
_ENDS = tuple(str(_OURS / name) for name in ("step/step.py", "verify/preflight/tracing.py", "verify/subject.py"))
"""Who calls your code: lines further out did not ask for what is seen."""

_Kind = Literal["yours", "library", "skip", "end"]


@cache
def _kind(file: str) -> _Kind:
    if file.startswith(_ENDS):
        return "end"
    if file.startswith(str(_OURS / "recipes")):
        return "library"
    if file.startswith((str(_OURS), _TORCH, "<")):
        return "skip"
    if any(name in file for name in _INSTALLED):
        return "library"
    return "skip" if file.startswith(_STANDARD) else "yours"


def line_at_work() -> Line | None:
    """Your line; a library's or a recipe's if none of yours is at work; None if torch alone is."""
    frame: FrameType | None = sys._getframe(1)
    library: Line | None = None
    while frame is not None:
        kind = _kind(frame.f_code.co_filename)
        if kind == "yours":
            return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        if kind == "end":
            break
        if kind == "library" and library is None:
            library = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return library


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
