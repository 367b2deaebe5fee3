"""Run all checks of a device within a time budget and return a report without personal data.

This module does not import torch; the child processes do.
"""

import getpass
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Literal

from whet.base.errors import UsageError, WhetError
from whet.base.model import FrozenModel
from whet.base.version import VERSION
from whet.device.environment import FALLBACK
from whet.device.virtual_mac.installation import installed as installed_virtual_mac
from whet.doctor.check import CheckGroup, CheckResult
from whet.doctor.runner import CheckRunner
from whet.machine.facts import Machine, SystemState
from whet.machine.probe import probe, read_system
from whet.run.folder import installed_versions

FORMAT_VERSION = 1
BUDGET_SECONDS = 120.0

# "0" disables the CPU fallback, so that a missing operator is reported as missing whatever the user has set. One
# thread: small kernels on many threads are very slow on a busy machine. Only the speed checks use all threads.
_STEADY = {FALLBACK: "0", "OMP_NUM_THREADS": "1"}

GROUPS = (
    CheckGroup(name="environment", table="whet.doctor.checks.environment:CHECKS"),
    CheckGroup(name="operators", table="whet.doctor.checks.operators:CHECKS", environment=_STEADY),
    CheckGroup(name="hazards", table="whet.doctor.checks.hazards:CHECKS", environment=_STEADY),
    CheckGroup(name="parity", table="whet.doctor.checks.training:PARITY", environment=_STEADY),
    CheckGroup(name="resume", table="whet.doctor.checks.training:RESUME", environment=_STEADY),
    CheckGroup(name="speeds", table="whet.doctor.checks.speeds:CHECKS"),
)

# Called with the name of a group when it starts, and with each result when it is available.
CheckCallback = Callable[[str, CheckResult | None], None]


class DoctorReport(FrozenModel):
    """The results of all checks of one device. The report does not identify the owner."""

    format_version: Literal[1] = 1
    whet: str
    device: str
    is_virtual: bool
    """Whether the device was simulated. The results then do not describe a real Mac."""
    is_quick: bool
    started: str
    finished: str
    budget_seconds: float
    machine: Machine
    system_state: SystemState
    system_state_after: SystemState
    num_busy_processes: int
    """Other processes that used a whole core or 10 % of the memory at the start. Their names are left out."""
    load_per_core: float | None = None
    """Runnable processes per core in the minute before the start. Above 1, all speeds are too low."""
    versions: dict[str, str | None]
    checks: tuple[CheckResult, ...]

    @property
    def problems(self) -> tuple[CheckResult, ...]:
        """The results that need attention."""
        return tuple(result for result in self.checks if result.is_problem)


def run_doctor(
    device: str = "auto",
    *,
    budget_seconds: float = BUDGET_SECONDS,
    quick: bool = False,
    show: CheckCallback | None = None,
    groups: Sequence[CheckGroup] = GROUPS,
) -> DoctorReport:
    """Run every check on a device. A check that raises, crashes, hangs or exceeds the budget also yields a result."""
    _validate_device_name(device)
    started, ends_at = _now(), time.monotonic() + budget_seconds
    load_per_core = _load_per_core()
    virtual = installed_virtual_mac()
    probed = probe()
    machine = virtual or probed.machine
    device = choose_device(device, machine)
    results: list[CheckResult] = []
    with tempfile.TemporaryDirectory(prefix="whet-doctor-") as folder:
        runner = CheckRunner(
            device=device,
            ends_at=ends_at,
            budget_seconds=budget_seconds,
            virtual_mac=None if virtual is None else _write_machine(virtual, Path(folder)),
            only_quick=quick,
            scratch=Path(folder),
        )
        for group in groups:
            if show is not None:
                show(group.name, None)
            for result in runner.run(group):
                results.append(_redact_result(result))
                if show is not None:
                    show(group.name, results[-1])
    return DoctorReport(
        whet=VERSION,
        device=device,
        is_virtual=virtual is not None,
        is_quick=quick,
        started=started,
        finished=_now(),
        budget_seconds=budget_seconds,
        machine=_redact_machine(machine),
        # The names of busy processes may be private, so report only their number.
        system_state=probed.system_state.model_copy(update={"busy": ()}),
        system_state_after=read_system().system_state.model_copy(update={"busy": ()}),
        num_busy_processes=len(probed.system_state.busy),
        load_per_core=load_per_core,
        versions=installed_versions(),
        checks=tuple(results),
    )


def choose_device(name: str, machine: Machine) -> str:
    """Return the device to examine: the requested one, or the one that training would use. Raises UsageError."""
    if machine.torch.error is not None:
        raise WhetError("torch cannot be imported", got=redact(machine.torch.error), try_="whet probe shows more")
    kind, _, index = name.partition(":")
    kinds = [kind for kind in ("cuda", "mps") if machine.accelerator(kind) is not None]
    if kind == "auto":
        return (kinds or ["cpu"])[0]
    count = sum(accelerator.kind == kind for accelerator in machine.accelerators)
    if kind != "cpu" and int(index or 0) >= count:
        absent = next((absent for absent in machine.absent if absent.device == kind), None)
        why = absent.reason if absent else f"{count} of that kind, counted from 0"
        raise UsageError(f"there is no {name} to examine", got=why, try_=absent.fix if absent else "--device auto")
    return name


def _validate_device_name(name: str) -> None:
    kind, _, index = name.partition(":")
    if kind not in ("auto", "cpu", "cuda", "mps") or (index and (kind != "cuda" or not index.isdecimal())):
        raise UsageError("no such device", got=name, try_="auto, mps, cuda, cuda:1 or cpu")


def report_bytes(report: DoctorReport) -> bytes:
    """Return the report as the bytes of a JSON file to share."""
    return (json.dumps(report.as_json(), indent=2, allow_nan=False) + "\n").encode()


def _write_machine(virtual: Machine, folder: Path) -> Path:
    """Write the virtual machine to a file, which the child processes read."""
    path = folder / "machine.json"
    name, sources = virtual.name.removesuffix(" (virtual)"), virtual.sources[:-1]
    path.write_text(json.dumps(virtual.model_copy(update={"name": name, "sources": sources}).as_json()))
    return path


def _load_per_core() -> float | None:
    try:
        return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)
    except OSError:
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# --- Personal data ---------------------------------------------------------------------------------------------------

_PATH = re.compile(r"(?<![\w:/.])(?:~|[A-Za-z]:)?(?:/[^\s/:'\"<>,;()]+){2,}/?")
# A quoted path may contain spaces.
_QUOTED_PATH = re.compile(r"""(['"`])(?:~|/)[^'"`\n]*/([^'"`/\n]*)/?\1""")
# Replacing a name of one letter would garble the text.
_MIN_NAME_LENGTH = 2


def redact(text: str) -> str:
    """Shorten paths to their last component, and remove the names of the user and the computer.

    >>> redact("dlopen(/Users/anna/venv/lib/libtorch.dylib) failed")
    'dlopen(.../libtorch.dylib) failed'
    """
    for replacement, pattern in _name_patterns():
        text = pattern.sub(replacement, text)
    text = _QUOTED_PATH.sub(r"\1.../\2\1", text)
    return _PATH.sub(lambda match: ".../" + match[0].rstrip("/").rsplit("/", 1)[-1], text)


@lru_cache(maxsize=1)
def _name_patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    host = platform.node()
    # Replace the home folder first: its components may be names that are replaced later.
    names = [("~", str(Path.home())), ("(host)", host), ("(host)", host.split(".")[0]), ("(user)", _user_name())]
    return tuple(
        (replacement, re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE))
        for replacement, name in names
        if len(name) >= _MIN_NAME_LENGTH
    )


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""


def _redact_result(result: CheckResult) -> CheckResult:
    figures = {name: redact(value) if isinstance(value, str) else value for name, value in result.figures.items()}
    return result.model_copy(update={"what": redact(result.what), "figures": figures})


def _redact_machine(machine: Machine) -> Machine:
    """Redact the error of torch, the only text of a machine that may contain a path."""
    error = machine.torch.error
    torch = machine.torch.model_copy(update={"error": error and redact(error)})
    return machine.model_copy(update={"torch": torch})
