"""A check of a device and its result. Does not import torch, so that results can be read anywhere."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from whet.base.model import FrozenModel

if TYPE_CHECKING:
    import torch

    from whet.device.abstract import AbstractDevice

Verdict = Literal["good", "differs", "failed", "not applicable", "skipped"]
Figure = bool | int | float | str | None

CHECK_SECONDS = 30.0


class CheckFinding(FrozenModel):
    """The outcome of a check: a verdict, a sentence, and the figures that support it."""

    verdict: Verdict
    what: str
    figures: dict[str, Figure] = Field(default_factory=dict)


class CheckResult(CheckFinding):
    """A finding in the report, with the name and duration in seconds of its check."""

    group: str
    name: str
    seconds: float
    issue: int | None = None
    """The pytorch/pytorch issue or pull request that describes a known hazard."""

    @property
    def is_problem(self) -> bool:
        """Whether the result must be reported as a problem."""
        return self.verdict in ("differs", "failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceUnderTest:
    """The device that a check runs on."""

    device: "AbstractDevice"
    name: str
    """The name as the user types it, such as mps, cuda:1 or cpu."""
    is_virtual: bool

    @property
    def torch_device(self) -> "torch.device":
        return self.device.torch_device

    def put(self, tensor: Any) -> Any:
        """Return the tensor, copied to the device."""
        return tensor.to(self.torch_device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A named function that examines a device."""

    name: str
    run: Callable[[DeviceUnderTest], CheckFinding]
    limit_seconds: float = CHECK_SECONDS
    is_quick: bool = False
    """Whether `whet doctor --quick` includes the check."""
    issue: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckGroup:
    """Checks that run one after another in the same process."""

    name: str
    table: str
    """The list of checks, as "module:attribute"."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the process."""


def good(what: str, **figures: Figure) -> CheckFinding:
    """Return the finding of a check whose result is correct."""
    return CheckFinding(verdict="good", what=what, figures=_json_figures(figures))


def differs(what: str, **figures: Figure) -> CheckFinding:
    """Return the finding of a check whose result is wrong."""
    return CheckFinding(verdict="differs", what=what, figures=_json_figures(figures))


def failed(what: str, **figures: Figure) -> CheckFinding:
    """Return the finding of a check that could not run."""
    return CheckFinding(verdict="failed", what=what, figures=_json_figures(figures))


def not_applicable(what: str, **figures: Figure) -> CheckFinding:
    """Return the finding of a check that does not apply to this device."""
    return CheckFinding(verdict="not applicable", what=what, figures=_json_figures(figures))


def skipped(what: str, **figures: Figure) -> CheckFinding:
    """Return the finding of a check that was not run, or was not completed."""
    return CheckFinding(verdict="skipped", what=what, figures=_json_figures(figures))


def _json_figures(figures: Mapping[str, Figure]) -> dict[str, Figure]:
    """Round floats to four digits. Convert NaN and Inf to text, because JSON cannot represent them."""
    return {name: _round(value) if isinstance(value, float) else value for name, value in figures.items()}


def _round(value: float) -> float | str:
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)
