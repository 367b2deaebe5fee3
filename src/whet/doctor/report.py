"""Run all checks of a device within a time budget, and return a report without personal data.

This module does not import torch. The child processes do.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from whet.base.errors import UsageError, WhetError
from whet.base.model import FrozenModel
from whet.base.version import VERSION
from whet.device.environment import FALLBACK
from whet.device.virtual_mac.installation import installed as installed_virtual_mac
from whet.doctor.check import CheckGroup, CheckResult
from whet.doctor.redaction import redact
from whet.doctor.runner import CheckRunner
from whet.machine.facts import Machine, SystemState
from whet.machine.pressure import read_system_state
from whet.machine.probe import probe
from whet.run.folder import installed_versions

FORMAT_VERSION = 1
BUDGET_SECONDS = 120.0

# Disable the CPU fallback, so that a missing operator is reported as missing, whatever the user has set. Use one
# thread, because small kernels on many threads are very slow on a busy machine. Only the speed checks use all threads.
_STEADY = {FALLBACK: "0", "OMP_NUM_THREADS": "1"}

GROUPS = (
    CheckGroup(name="environment", table="whet.doctor.checks.environment:CHECKS"),
    CheckGroup(name="operators", table="whet.doctor.checks.operators:CHECKS", environment=_STEADY),
    CheckGroup(name="hazards", table="whet.doctor.checks.hazards:CHECKS", environment=_STEADY),
    CheckGroup(name="parity", table="whet.doctor.checks.training:PARITY", environment=_STEADY),
    CheckGroup(name="resume", table="whet.doctor.checks.training:RESUME", environment=_STEADY),
    CheckGroup(name="speeds", table="whet.doctor.checks.speeds:CHECKS"),
)

# Called with the name of a group and None when it starts, and with the name and each result when it is available.
CheckCallback = Callable[[str, CheckResult | None], None]


class DoctorReport(FrozenModel):
    """The results of all checks of one device. The report does not identify its owner."""

    format_version: Literal[1] = 1
    whet: str
    device: str
    is_virtual: bool
    """Whether the device was simulated, so that the results do not describe a real Mac."""
    is_quick: bool
    started: str
    finished: str
    budget_seconds: float
    machine: Machine
    system_state: SystemState
    system_state_after: SystemState
    num_busy_processes: int
    """Number of other processes that used about a core or 10 % of the memory at the start. Names are omitted."""
    load_per_core: float | None = None
    """Load average per core in the minute before the start. Above 1, all speeds are too low."""
    versions: dict[str, str | None]
    checks: tuple[CheckResult, ...]

    @property
    def problems(self) -> tuple[CheckResult, ...]:
        """The results of checks that found a problem."""
        return tuple(result for result in self.checks if result.is_problem)


def run_doctor(
    device: str = "auto",
    *,
    budget_seconds: float = BUDGET_SECONDS,
    quick: bool = False,
    show: CheckCallback | None = None,
    groups: Sequence[CheckGroup] = GROUPS,
) -> DoctorReport:
    """Run every check on a device. A check that raises, crashes, hangs or exceeds the budget has a result too."""
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
        # Names of busy processes may be private, so report only their number.
        system_state=probed.system_state.model_copy(update={"busy": ()}),
        system_state_after=read_system_state(),
        num_busy_processes=len(probed.system_state.busy),
        load_per_core=load_per_core,
        # The platform contains the name of the Linux kernel, which may name a company. `machine` has the system.
        versions={name: version for name, version in installed_versions().items() if name != "platform"},
        checks=tuple(results),
    )


def choose_device(name: str, machine: Machine) -> str:
    """Return the device to examine: the requested one, or for "auto" the one that training would use.

    Raise WhetError if torch cannot be imported, or UsageError if the machine has no such device.
    """
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
        raise UsageError(f"there is no {name} device to test", got=why, try_=absent.fix if absent else "--device auto")
    return name


def _validate_device_name(name: str) -> None:
    kind, _, index = name.partition(":")
    if kind not in ("auto", "cpu", "cuda", "mps") or (index and (kind != "cuda" or not index.isdecimal())):
        raise UsageError("no such device", got=name, try_="auto, mps, cuda, cuda:1 or cpu")


def report_bytes(report: DoctorReport) -> bytes:
    """Return the report as the bytes of a small JSON file to share, with one line per check and no default values."""
    data = {"format_version": FORMAT_VERSION, **report.model_dump(mode="json", exclude_defaults=True)}
    checks = ",\n".join(f"  {json.dumps(check, allow_nan=False)}" for check in data.pop("checks"))
    head = json.dumps(data, indent=1, allow_nan=False).removesuffix("\n}")
    return f'{head},\n "checks": [\n{checks}\n ]\n}}\n'.encode()


def _write_machine(virtual: Machine, folder: Path) -> Path:
    """Write the virtual Mac to a file for the child processes, and return its path."""
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


def _redact_result(result: CheckResult) -> CheckResult:
    figures = {name: redact(value) if isinstance(value, str) else value for name, value in result.figures.items()}
    return result.model_copy(update={"what": redact(result.what), "figures": figures})


def _redact_machine(machine: Machine) -> Machine:
    """Redact the free text in the facts about a machine. Names of chips and systems are not personal."""
    error = machine.torch.error
    torch = machine.torch.model_copy(update={"error": error and redact(error)})
    absent = tuple(device.model_copy(update={"reason": redact(device.reason)}) for device in machine.absent)
    return machine.model_copy(update={"torch": torch, "absent": absent})
