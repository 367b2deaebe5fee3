"""Findings of a check, and the types for producing them: detectors, operator calls and source lines."""

import linecache
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from whet.base.model import FrozenModel
from whet.base.origin import _WHET_FOLDER, code_origin

# File, line number and function. The source code itself is read only when a finding is created.
SourceLine = tuple[str, int, str]
# Functions of whet that call user code, by file. None means all functions. The callers of these functions belong to the
# implementation of the command.
_CALLERS = {
    str(_WHET_FOLDER / "step/step.py"): None,
    str(_WHET_FOLDER / "verify/trainable.py"): None,
    # Do not list the whole file, because it also contains the recorder, whose frames are the innermost ones.
    str(_WHET_FOLDER / "verify/preflight/trace.py"): ("trace_steps", "_train"),
}


def user_line() -> SourceLine | None:
    """Return the innermost line of user code, or else of a library or recipe. None if there are only other frames."""
    frame: FrameType | None = sys._getframe(1)
    library: SourceLine | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        author = code_origin(file)
        if author == "you":
            return file, frame.f_lineno, frame.f_code.co_name
        if file in _CALLERS and frame.f_code.co_name in (_CALLERS[file] or (frame.f_code.co_name,)):
            break
        if author in ("library", "recipe") and library is None:
            library = file, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return library


# --- findings ---------------------------------------------------------------------------------------------------------

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


class SourceLocation(FrozenModel):
    """A line of source code outside torch and whet."""

    file: str
    line: int
    function: str = ""
    code: str = ""
    is_backward: bool = False
    """Whether the finding is in the backward pass of this line."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (", in its backward pass" if self.is_backward else "")


def locate_line(line: SourceLine, *, is_backward: bool = False) -> SourceLocation:
    """Return the location of a line, with its source code. The path is relative to the current folder if possible."""
    file, number, function = line
    path, folder = Path(file).absolute(), Path.cwd()
    return SourceLocation(
        file=str(path.relative_to(folder) if path.is_relative_to(folder) else path),
        line=number,
        function=function,
        code=linecache.getline(file, number).strip(),
        is_backward=is_backward,
    )


class PreflightFinding(FrozenModel):
    """A problem, with its location, a suggestion, and its number of occurrences."""

    id: str
    """Kind of the finding, such as "missing-operator"."""
    severity: Severity
    what: str
    try_: str
    place: SourceLocation | None = None
    during: str = ""
    """Part of the step, for findings without a line of user code."""
    count: int = 1
    """Number of occurrences in one step."""


@dataclass(frozen=True, slots=True)
class Detection:
    """A problem that a detector reports for one call, without location and count, which the recorder adds."""

    id: str
    severity: Severity
    what: str
    try_: str

    def as_finding(
        self, line: SourceLine | None, *, during: str, is_backward: bool = False, count: int = 1
    ) -> PreflightFinding:
        return PreflightFinding(
            id=self.id,
            severity=self.severity,
            what=self.what,
            try_=self.try_,
            place=locate_line(line, is_backward=is_backward) if line else None,
            during="" if line else during,
            count=count,
        )


# --- detectors --------------------------------------------------------------------------------------------------------

TracePhase = Literal["init", "training", "updating"]
_PHASE_NAMES: dict[TracePhase, str] = {
    "init": "the construction of the model",
    "training": "the forward pass",
    "updating": "the optimizer's step",
}


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """A completed call of an operator."""

    func: torch._ops.OpOverload
    name: str
    """Name with the overload, such as "add.Tensor"."""
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
    def has_uneven_sizes(self) -> bool:
        """Whether the input and output sizes do not divide each other in one of the last two dimensions."""
        sizes = zip(self.inputs[0].shape[-2:], self.outputs[0].shape[-2:], strict=True)
        return any(max(a, b) % max(min(a, b), 1) for a, b in sizes)

    @property
    def new_outputs(self) -> Iterator[Tensor]:
        """The outputs that are not views of an input."""
        storages = {tensor.untyped_storage()._cdata for tensor in self.inputs}
        return (tensor for tensor in self.outputs if tensor.untyped_storage()._cdata not in storages)


class FunctionCall(NamedTuple):
    """A call of a torch function, before it runs."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Detector:
    """Base class of detectors, which inspect every call of a trace and report problems."""

    def operator(self, call: OperatorCall) -> Iterable[Detection]:  # noqa: ARG002
        """Return the problems of an operator call, after the operator has run."""
        return ()

    def function(self, call: FunctionCall) -> Iterable[Detection]:  # noqa: ARG002
        """Return the problems of a torch function call before it is decomposed into operators."""
        return ()


_LogKey = tuple[Detection, SourceLine | None, bool, TracePhase]


@dataclass
class DetectionLog:
    """Collects detections with their source lines, counted per step."""

    step: int = 0
    counts: dict[_LogKey, dict[int, int]] = field(default_factory=dict)

    def add(self, detection: Detection, line: SourceLine | None, *, is_backward: bool, phase: TracePhase) -> None:
        by_step = self.counts.setdefault((detection, line, is_backward, phase), {})
        by_step[self.step] = by_step.get(self.step, 0) + 1

    def findings(self) -> list[PreflightFinding]:
        """Return the findings in the order of their first occurrence."""
        return [
            detection.as_finding(
                line,
                during="the backward pass" if is_backward else _PHASE_NAMES[phase],
                is_backward=is_backward,
                count=next(iter(by_step.values())),
            )
            for (detection, line, is_backward, phase), by_step in self.counts.items()
        ]
