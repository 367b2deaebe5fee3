"""Run checks in child processes with time limits.

Each group of checks has its own process. If the process crashes or hangs, this becomes the result of the current check,
and the remaining checks run in a new process.
"""

import contextlib
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.base import env
from whet.base.errors import describe_error
from whet.base.model import FrozenModel
from whet.base.worker import JsonWorker, WorkerChannel, WorkerExitError, WorkerTimeoutError, load_object
from whet.device.stderr_watch import METAL_FAILURES, WATCHDOG_TEXTS
from whet.doctor.check import Check, CheckFinding, CheckGroup, CheckResult, DeviceUnderTest, failed, skipped

if TYPE_CHECKING:
    from whet.device.abstract import AbstractDevice

# Time limit for importing torch, and for opening the device.
START_SECONDS = 90.0


class CheckListing(FrozenModel):
    """The name and properties of a check, as sent by the child process."""

    name: str
    limit_seconds: float
    is_quick: bool
    issue: int | None


# A placeholder for all checks of a group whose list could not be loaded.
_ALL = CheckListing(name="all", limit_seconds=0, is_quick=True, issue=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckRunner:
    """Runs groups of checks on one device until a deadline."""

    device: str
    ends_at: float
    """The deadline on the monotonic clock."""
    budget_seconds: float
    virtual_mac: Path | None = None
    only_quick: bool = False
    scratch: Path | None = None
    """The temporary folder of the child processes. The parent removes it, because a killed child cannot."""

    def run(self, group: CheckGroup) -> Iterator[CheckResult]:
        """Run the checks of one group, and yield each result as it arrives."""
        done = 0
        # Until the child lists its checks, use the placeholder.
        checks: tuple[CheckListing, ...] = (_ALL,)
        while done < len(checks) and not self.is_over:
            process = _CheckProcess(self, group, first=done)
            for result in process.results():
                done += 1
                yield result
            checks = process.checks or checks
        for check in checks[done:]:
            yield _result(group, check, skipped(f"the budget of {self.budget_seconds:.0f} s was used up"))

    @property
    def is_over(self) -> bool:
        """Whether the deadline for all checks has passed."""
        return self.ends_at <= time.monotonic()

    @property
    def start_timeout(self) -> float:
        return min(START_SECONDS, max(0.0, self.ends_at - time.monotonic()))

    def start(self, group: CheckGroup, *, first: int) -> JsonWorker:
        """Start a process that runs the checks of a group, beginning with number `first`."""
        scratch = {} if self.scratch is None else {"TMPDIR": str(self.scratch)}
        arguments = {
            "table": group.table,
            "first": first,
            "only_quick": self.only_quick,
            "device": self.device,
            "virtual_mac": None if self.virtual_mac is None else str(self.virtual_mac),
        }
        environment = env.child_environment(**{**group.environment, **scratch})
        return JsonWorker("whet.doctor.runner:run_checks", arguments, environment=environment)


class _CheckProcess:
    """One child process. It runs checks from `first` to the last one, or until it crashes."""

    def __init__(self, runner: CheckRunner, group: CheckGroup, *, first: int) -> None:
        self.checks: tuple[CheckListing, ...] = ()
        """All checks of the group, or empty if they could not be loaded."""
        self._runner, self._group, self._first = runner, group, first

    def results(self) -> Iterator[CheckResult]:
        runner, group = self._runner, self._group
        with runner.start(group, first=self._first) as worker:
            listing = self._receive_start(worker)
            if listing is None:
                if not runner.is_over:
                    yield _result(group, _ALL, failed(f"the checks could not be loaded: {worker.describe_exit()}"))
                return
            self.checks = tuple(CheckListing.model_validate(check) for check in listing["checks"])
            remaining = self.checks[self._first :]
            opened = self._receive_start(worker)
            if opened is None or "error" in opened:
                if not runner.is_over:
                    reason = opened["error"] if opened else worker.describe_exit()
                    why = failed(f"{runner.device} could not be opened: {reason}")
                    yield from (_result(group, check, why) for check in remaining)
                return
            for check in remaining:
                result, has_answered = self._await(worker, check)
                if result is not None:
                    yield result
                if not has_answered:
                    return

    def _receive_start(self, worker: JsonWorker) -> dict[str, Any] | None:
        try:
            return worker.receive(self._runner.start_timeout)
        except (WorkerTimeoutError, WorkerExitError):
            return None

    def _await(self, worker: JsonWorker, check: CheckListing) -> tuple[CheckResult | None, bool]:
        """Return the result of a check, or None if the deadline has passed, and whether the process can continue."""
        runner, group, start = self._runner, self._group, time.monotonic()
        left = runner.ends_at - start
        if left <= 0:
            return None, False
        try:
            response = worker.receive(min(check.limit_seconds, left))
        except WorkerExitError:
            finding = failed(f"the process died: {worker.describe_exit()}", outcome="died")
        except WorkerTimeoutError:
            seconds = time.monotonic() - start
            # If the budget ended before the limit of the check, its result is unknown. Otherwise it hung.
            if left < check.limit_seconds:
                budget = f"the budget of {runner.budget_seconds:.0f} s was used up"
                finding = skipped(f"stopped after {seconds:.0f} s: {budget}")
            else:
                finding = failed(f"no response after {seconds:.0f} s; the process was killed", outcome="hung")
        else:
            return _result(group, check, _finding(response, worker), seconds=float(response["seconds"])), True
        return _result(group, check, finding, seconds=time.monotonic() - start), False


def _finding(response: dict[str, Any], worker: JsonWorker) -> CheckFinding:
    finding = CheckFinding.model_validate(response["finding"])
    # The driver may report an error on stderr that does not reach Python.
    lines = worker.read_stderr(response["stderr_bytes"]).splitlines()
    fault = next((line.strip()[:300] for line in lines if any(fault in line for fault in METAL_FAILURES)), None)
    if fault is None:
        return finding
    # The reason follows on a separate line. It is not a fault of the device if the display's watchdog stopped the work.
    if any(text in line for line in lines for text in WATCHDOG_TEXTS):
        fault = "macOS stopped its work for the display; try again with the display asleep, or through SSH"
    return failed(f"the GPU reported: {fault}", **{**finding.figures, "outcome": "silent fault"})


def _result(group: CheckGroup, check: CheckListing, finding: CheckFinding, *, seconds: float = 0.0) -> CheckResult:
    return CheckResult(
        group=group.name,
        name=check.name,
        seconds=round(seconds, 3),
        issue=check.issue,
        verdict=finding.verdict,
        what=finding.what,
        figures=finding.figures,
    )


# --- in the child process --------------------------------------------------------------------------------------------


def run_checks(channel: WorkerChannel, arguments: dict[str, Any]) -> int:
    """Send the list of checks, open the device, and run the checks in order, with a message for each."""
    checks = [check for check in load_checks(arguments["table"]) if check.is_quick or not arguments["only_quick"]]
    fields = ("name", "limit_seconds", "is_quick", "issue")
    channel.send({"checks": [{name: getattr(check, name) for name in fields} for check in checks]})
    try:
        device = _open_device(arguments["device"], arguments["virtual_mac"])
    except Exception as error:
        channel.send({"error": describe_error(error)})
        return 0
    channel.send({"ready": True})
    for check in checks[arguments["first"] :]:
        start = time.perf_counter()
        finding = run_check_safely(check, device)
        seconds = time.perf_counter() - start
        # The parent uses the size of stderr to assign messages of the driver to checks.
        channel.send({"seconds": seconds, "finding": finding.as_json(), "stderr_bytes": os.fstat(2).st_size})
    return 0


def load_checks(table: str) -> list[Check]:
    """Import the list of checks given as "module:attribute"."""
    return list(load_object(table))


def run_check_safely(check: Check, device: DeviceUnderTest) -> CheckFinding:
    """Run a check. Convert an exception to a finding."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            finding = check.run(device)
            device.device.sync()
            return finding
    except Exception as error:
        with contextlib.suppress(Exception):
            device.device.memory.empty_cache()
        return failed(describe_error(error), outcome="raised")


def _open_device(name: str, virtual_mac: str | None) -> DeviceUnderTest:
    from whet.device.environment import configure_mps_memory

    configure_mps_memory()
    if virtual_mac is not None:
        from whet.device.virtual_mac.installation import install

        install(virtual_mac)
    from whet.device.open import open_device

    device: AbstractDevice = open_device(name).device
    device.use_precision("fp32")
    return DeviceUnderTest(device=device, name=name, is_virtual=virtual_mac is not None)
