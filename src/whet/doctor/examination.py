"""Runs all checks of a device within a time budget and returns a report without personal data."""

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
from whet.device.virtual_mac.install import installed as installed_virtual_mac
from whet.doctor.check import CheckGroup, CheckResult
from whet.doctor.runner import CheckRunner
from whet.machine.facts import Conditions, Machine
from whet.machine.probe import probe, read_system
from whet.run.folder import installed_versions

_PATH = re.compile(r"(?<![\w:/.])(?:~|[A-Za-z]:)?(?:/[^\s/:'\"<>,;()]+){2,}/?")
_QUOTED = re.compile(r"""(['"`])(?:~|/)[^'"`\n]*/([^'"`/\n]*)/?\1""")
"""In quotes a path may hold blanks."""
_SHORTEST_NAME = 2


def redact(text: str) -> str:
    """The text with paths cut down to their last part, and without the user's and the computer's name.

    >>> without_names("dlopen(/Users/anna/venv/lib/libtorch.dylib) failed")
    'dlopen(.../libtorch.dylib) failed'
    """
    for shown, pattern in _patterns():
        text = pattern.sub(shown, text)
    text = _QUOTED.sub(r"\1.../\2\1", text)
    return _PATH.sub(lambda found: ".../" + found[0].rstrip("/").rsplit("/", 1)[-1], text)


@lru_cache(maxsize=1)
def _patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    host = platform.node()
    # The home first: its parts may be names too.
    names = [("~", str(Path.home())), ("(host)", host), ("(host)", host.split(".")[0]), ("(user)", _user())]
    return tuple(
        (shown, re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE))
        for shown, name in names
        if len(name) >= _SHORTEST_NAME
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""


FORMAT_VERSION = 1
BUDGET_SECONDS = 120.0

# A missing operator shall be seen as missing, whatever the user's environment says; "0" switches the fall-back off.
# One thread: small kernels on many threads crawl on a busy computer; only speeds need them all.
_STEADY = {FALLBACK: "0", "OMP_NUM_THREADS": "1"}

GROUPS = (
    CheckGroup(name="environment", table="whet.doctor.checks.environment:CHECKS"),
    CheckGroup(name="operators", table="whet.doctor.checks.operators:CHECKS", environment=_STEADY),
    CheckGroup(name="hazards", table="whet.doctor.checks.hazards:CHECKS", environment=_STEADY),
    CheckGroup(name="parity", table="whet.doctor.checks.training:PARITY", environment=_STEADY),
    CheckGroup(name="resume", table="whet.doctor.checks.training:RESUME", environment=_STEADY),
    CheckGroup(name="speeds", table="whet.doctor.checks.speeds:CHECKS"),
)

CheckCallback = Callable[[str, CheckResult | None], None]
"""Is told the name of a group when it begins, and each check when it is done."""


class DoctorReport(FrozenModel):
    """One device of one machine, examined once. Nothing in it names the owner."""

    format_version: Literal[1] = 1
    whet: str
    device: str
    is_virtual: bool
    """Whether the device was simulated: nothing then says anything about a real Mac."""
    is_quick: bool
    started: str
    finished: str
    budget_seconds: float
    machine: Machine
    conditions: Conditions
    conditions_after: Conditions
    num_busy_processes: int
    """Others that took a whole core or a tenth of the memory while we began; their names are left out."""
    load_per_core: float | None = None
    """Processes that wanted to run in the minute before we began, for each core; above 1 all speeds are too low."""
    versions: dict[str, str | None]
    checks: tuple[CheckResult, ...]

    @property
    def trouble(self) -> tuple[CheckResult, ...]:
        """What somebody should look at."""
        return tuple(check for check in self.checks if check.is_trouble)


def examine_device(
    device: str = "auto",
    *,
    budget_seconds: float = BUDGET_SECONDS,
    quick: bool = False,
    show: CheckCallback | None = None,
    groups: Sequence[CheckGroup] = GROUPS,
) -> DoctorReport:
    """Runs every check on a device. A check that raises, dies, hangs or is cut by the budget is a finding."""
    _validate_device_name(device)
    started, ends_at = _now(), time.monotonic() + budget_seconds
    load_per_core = _load_per_core()
    virtual = installed_virtual_mac()
    found = probe()
    machine = virtual or found.machine
    device = choose_device(device, machine)
    checks: list[CheckResult] = []
    with tempfile.TemporaryDirectory(prefix="whet-doctor-") as folder:
        ward = CheckRunner(
            device=device,
            ends_at=ends_at,
            budget_seconds=budget_seconds,
            virtual_mac=None if virtual is None else _written(virtual, Path(folder)),
            only_quick=quick,
            scratch=Path(folder),
        )
        for group in groups:
            if show is not None:
                show(group.name, None)
            for check in ward.run(group):
                checks.append(_shareable(check))
                if show is not None:
                    show(group.name, checks[-1])
    return DoctorReport(
        whet=VERSION,
        device=device,
        is_virtual=virtual is not None,
        is_quick=quick,
        started=started,
        finished=_now(),
        budget_seconds=budget_seconds,
        machine=_redact_machine(machine),
        conditions=found.conditions.model_copy(update={"busy": ()}),
        conditions_after=read_system().conditions.model_copy(update={"busy": ()}),
        num_busy_processes=len(found.conditions.busy),
        load_per_core=load_per_core,
        versions=installed_versions(),
        checks=tuple(checks),
    )


def choose_device(name: str, machine: Machine) -> str:
    """The device to examine: what was asked for, or what training would take; refused if it is not there."""
    if machine.torch.error is not None:
        raise WhetError("torch cannot be loaded", got=redact(machine.torch.error), try_="whet probe says more")
    kind, _, index = name.partition(":")
    kinds = [kind for kind in ("cuda", "mps") if machine.accelerator(kind) is not None]
    if kind == "auto":
        return (kinds or ["cpu"])[0]
    num_there = sum(accelerator.kind == kind for accelerator in machine.accelerators)
    if kind != "cpu" and int(index or 0) >= num_there:
        absent = next((absent for absent in machine.absent if absent.device == kind), None)
        why = absent.reason if absent else f"{num_there} of that kind, counted from 0"
        raise UsageError(f"there is no {name} to examine", got=why, try_=absent.fix if absent else "--device auto")
    return name


def _validate_device_name(name: str) -> None:
    kind, _, index = name.partition(":")
    if kind not in ("auto", "cpu", "cuda", "mps") or (index and (kind != "cuda" or not index.isdecimal())):
        raise UsageError("no such device", got=name, try_="auto, mps, cuda, cuda:1 or cpu")


def report_bytes(examination: DoctorReport) -> bytes:
    """The file to share."""
    return (json.dumps(examination.as_json(), indent=2, allow_nan=False) + "\n").encode()


def _written(virtual: Machine, folder: Path) -> Path:
    """The virtual machine as a file, so that the processes that check can be given the same one."""
    path = folder / "machine.json"
    name, sources = virtual.name.removesuffix(" (virtual)"), virtual.sources[:-1]
    path.write_text(json.dumps(virtual.model_copy(update={"name": name, "sources": sources}).as_json()))
    return path


def _shareable(check: CheckResult) -> CheckResult:
    figures = {name: redact(v) if isinstance(v, str) else v for name, v in check.figures.items()}
    return check.model_copy(update={"what": redact(check.what), "figures": figures})


def _redact_machine(machine: Machine) -> Machine:
    """A machine's facts hold no names; only a torch that could not be asked may have said a path."""
    error = machine.torch.error
    torch = machine.torch.model_copy(update={"error": error and redact(error)})
    return machine.model_copy(update={"torch": torch})


def _load_per_core() -> float | None:
    try:
        return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)
    except OSError:
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
