"""Findings of a check and where they come from: detectors, operator calls and source lines."""

import linecache
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor

from whet.base.model import FrozenModel
from whet.base.origin import _WHET_FOLDER, code_origin

SourceLine = tuple[str, int, str]
"""File, number and function: all that is taken at the time; the code is read when somebody looks."""

_CALLERS = frozenset(
    str(_WHET_FOLDER / name) for name in ("step/step.py", "verify/preflight/trace.py", "verify/trainable.py")
)
"""Who calls your code: lines further out did not ask for what is seen."""


def user_line() -> SourceLine | None:
    """Your line; a library's or a recipe's if none of yours is at work; None if torch alone is."""
    frame: FrameType | None = sys._getframe(1)
    library: SourceLine | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        author = code_origin(file)
        if author == "you":
            return file, frame.f_lineno, frame.f_code.co_name
        if file in _CALLERS:
            break
        if author in ("library", "recipe") and library is None:
            library = file, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return library


Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


class SourceLocation(FrozenModel):
    """A line of source that is neither torch's nor whet's."""

    file: str
    line: int
    function: str = ""
    code: str = ""
    is_backward: bool = False
    """Whether it is not this line that did it, but its backward pass."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (", in its backward pass" if self.is_backward else "")


def locate_line(line: SourceLine, *, is_backward: bool = False) -> SourceLocation:
    """The line with its code, its file as short as it can be named from here."""
    file, number, function = line
    path, here = Path(file).absolute(), Path.cwd()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    return SourceLocation(
        file=str(shown),
        line=number,
        function=function,
        code=linecache.getline(file, number).strip(),
        is_backward=is_backward,
    )


class CheckFinding(FrozenModel):
    id: str
    """What kind of finding it is, such as missing-operator."""
    severity: Severity
    what: str
    try_: str
    place: SourceLocation | None = None
    during: str = ""
    """The part of a step in which it was seen, where no line of yours was at work."""
    count: int = 1
    """How often in one step."""


@dataclass(frozen=True, slots=True)
class Detection:
    """What a watcher says about one call; the place and the count are found by the one who asked."""

    id: str
    severity: Severity
    what: str
    try_: str


TracePhase = Literal["making", "training", "updating"]


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One call of an operator, after it was made."""

    func: torch._ops.OpOverload
    name: str
    """With its overload: "add.Tensor"."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Tensor]
    outputs: list[Tensor]
    phase: TracePhase
    is_backward: bool

    @property
    def base(self) -> str:
        return self.name.partition(".")[0]

    @property
    def new_outputs(self) -> Iterator[Tensor]:
        """Those that are no views of what went in."""
        given = {tensor.untyped_storage()._cdata for tensor in self.inputs}
        return (tensor for tensor in self.outputs if tensor.untyped_storage()._cdata not in given)


class Detector:
    """Looks at calls; the base sees nothing."""

    def operator(self, call: OperatorCall) -> Iterable[Detection]:  # noqa: ARG002
        return ()

    def function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Detection]:  # noqa: ARG002
        """A function of torch that is about to be called, before it is taken apart into operators."""
        return ()


_Key = tuple[Detection, SourceLine | None, bool, TracePhase]

_PHASES: dict[TracePhase, str] = {
    "making": "the making of the model",
    "training": "the forward pass",
    "updating": "the optimizer's step",
}


@dataclass
class DetectionLog:
    """Sightings with their lines, counted for each step."""

    step: int = 0
    counts: dict[_Key, dict[int, int]] = field(default_factory=dict)

    def write(self, seen: Detection, line: SourceLine | None, *, is_backward: bool, phase: TracePhase) -> None:
        by_step = self.counts.setdefault((seen, line, is_backward, phase), {})
        by_step[self.step] = by_step.get(self.step, 0) + 1

    def findings(self) -> list[CheckFinding]:
        """In the order in which they were first seen."""
        return [
            CheckFinding(
                id=seen.id,
                severity=seen.severity,
                what=seen.what,
                try_=seen.try_,
                place=locate_line(line, is_backward=is_backward) if line else None,
                during="" if line else "the backward pass" if is_backward else _PHASES[phase],
                count=next(iter(by_step.values())),
            )
            for (seen, line, is_backward, phase), by_step in self.counts.items()
        ]
