"""A check of a device and its result."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from whet.base.model import FrozenModel

if TYPE_CHECKING:
    from whet.device.abstract import AbstractDevice

Verdict = Literal["good", "differs", "failed", "not applicable", "skipped"]
Figure = bool | int | float | str | None

CASE_SECONDS = 30.0


class CheckFinding(FrozenModel):
    """What a check found: a verdict, one line of words, and the numbers behind it."""

    verdict: Verdict
    what: str
    figures: dict[str, Figure] = Field(default_factory=dict)


class CheckResult(CheckFinding):
    """A finding in the record: which check, and how long it took."""

    group: str
    name: str
    seconds: float
    issue: int | None = None
    """The number at pytorch/pytorch that a known hazard is described under."""

    @property
    def is_trouble(self) -> bool:
        """Whether somebody should look at it."""
        return self.verdict in ("differs", "failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceUnderTest:
    """Where a check runs."""

    device: "AbstractDevice"
    name: str
    """As the user would write it: mps, cuda:1, cpu."""
    is_virtual: bool

    def put(self, tensor: Any) -> Any:
        """The tensor on the device that is examined."""
        return tensor.to(self.device.torch_device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One check: a name, and a function that tries it."""

    name: str
    run: Callable[[DeviceUnderTest], CheckFinding]
    limit_seconds: float = CASE_SECONDS
    is_quick: bool = False
    """Whether it belongs to the short examination too."""
    issue: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckGroup:
    """Checks that are run one after the other in one process."""

    name: str
    table: str
    """Where the list of cases is: "module:attribute"."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What is changed for its process."""


def good(what: str, **figures: Figure) -> CheckFinding:
    """All as it should be."""
    return CheckFinding(verdict="good", what=what, figures=_plain(figures))


def differs(what: str, **figures: Figure) -> CheckFinding:
    """It ran, and the result is another than it should be."""
    return CheckFinding(verdict="differs", what=what, figures=_plain(figures))


def failed(what: str, **figures: Figure) -> CheckFinding:
    """It did not run."""
    return CheckFinding(verdict="failed", what=what, figures=_plain(figures))


def not_applicable(what: str, **figures: Figure) -> CheckFinding:
    """There is nothing to find out here."""
    return CheckFinding(verdict="not applicable", what=what, figures=_plain(figures))


def skipped(what: str, **figures: Figure) -> CheckFinding:
    """It was not tried, or not to the end."""
    return CheckFinding(verdict="skipped", what=what, figures=_plain(figures))


def first_line(error: BaseException) -> str:
    """An exception in one line of bearable length."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no text'}"[:300]


def _plain(figures: Mapping[str, Figure]) -> dict[str, Figure]:
    """Numbers that JSON can hold: four figures are enough, and what is no number is written as a word."""
    return {name: _short(value) if isinstance(value, float) else value for name, value in figures.items()}


def _short(value: float) -> float | str:
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)
