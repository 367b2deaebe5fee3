"""Runs checks in child processes with time limits."""

import argparse
import contextlib
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.base import env
from whet.base.model import FrozenModel
from whet.base.worker import JsonWorker
from whet.doctor.check import Check, CheckFinding, CheckGroup, CheckResult, DeviceUnderTest, failed, first_line, skipped

if TYPE_CHECKING:
    from whet.device.abstract import AbstractDevice


MARK = "whet-doctor "


def main(words: Sequence[str] | None = None) -> None:
    """Says which cases a table has, opens the device, and runs the cases in their order."""
    given = _parser().parse_args(words)
    # Whatever torch or a driver prints goes to stderr: stdout belongs to the answers.
    answers = os.dup(1)
    os.dup2(2, 1)

    def say(**answer: Any) -> None:
        os.write(answers, (MARK + json.dumps(answer) + "\n").encode())

    cases = [case for case in load_checks(given.table) if case.is_quick or not given.only_quick]
    say(cases=[describe(case) for case in cases])
    try:
        place = _open(given.device, given.virtual_mac)
    except Exception as error:
        say(refused=first_line(error))
        return
    say(ready=True)
    for case in cases[given.first :]:
        start = time.perf_counter()
        found = run_check_safely(case, place)
        seconds = time.perf_counter() - start
        # How far stderr has grown says which case a complaint of the driver belongs to.
        say(end=case.name, seconds=seconds, finding=found.as_json(), stderr_bytes=os.fstat(2).st_size)
    sys.stderr.flush()
    # Without the usual way out: a driver that was upset may hang there.
    os._exit(0)


def load_checks(table: str) -> list[Check]:
    """The cases at "module:attribute"."""
    module, _, attribute = table.partition(":")
    return list(getattr(importlib.import_module(module), attribute))


def describe(case: Check) -> dict[str, Any]:
    """What the one who started us needs to know about a case."""
    return {
        "name": case.name,
        "limit_seconds": case.limit_seconds,
        "is_quick": case.is_quick,
        "issue": case.issue,
    }


def run_check_safely(case: Check, place: DeviceUnderTest) -> CheckFinding:
    """What a case finds; an exception is a finding too."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = case.run(place)
            place.device.sync()
            return found
    except Exception as error:
        with contextlib.suppress(Exception):
            place.device.memory.empty_cache()
        return failed(first_line(error), outcome="raised")


def _open(name: str, virtual_mac: Path | None) -> DeviceUnderTest:
    from whet.device.environment import configure_mps_memory

    configure_mps_memory()
    if virtual_mac is not None:
        from whet.device.virtual_mac.install import install

        install(str(virtual_mac))
    from whet.device.open import open_device

    device: AbstractDevice = open_device(name).device
    device.use_precision("fp32")
    return DeviceUnderTest(device=device, name=name, is_virtual=virtual_mac is not None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="whet.doctor.runner")
    parser.add_argument("table")
    parser.add_argument("--first", type=int, default=0, help="which case to begin with, counted from 0")
    parser.add_argument("--only-quick", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--virtual-mac", type=Path)
    return parser


if __name__ == "__main__":
    main()


START_SECONDS = 90.0
"""For loading torch and opening the device, at the worst."""
_SILENT_FAULTS = ("command buffer exited with error status", "Execution of the command buffer was aborted")
"""Metal prints these and lets the program go on with whatever is in memory (MPSStream.mm of torch 2.13)."""


class CheckListing(FrozenModel):
    """A case as its process describes it."""

    name: str
    limit_seconds: float
    is_quick: bool
    issue: int | None


_UNKNOWN = CheckListing(name="all", limit_seconds=0, is_quick=True, issue=None)
"""Stands for the cases of a group whose table could not be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckRunner:
    """Where and for how long the checks run."""

    device: str
    ends_at: float
    """On the monotonic clock."""
    budget_seconds: float
    virtual_mac: Path | None = None
    only_quick: bool = False
    scratch: Path | None = None
    """Where the processes put what they write; one that is ended cannot tidy up behind itself."""

    def run(self, group: CheckGroup) -> Iterator[CheckResult]:
        """The checks of one group as they are done."""
        done = 0
        cases: tuple[CheckListing, ...] = (_UNKNOWN,)
        while done < len(cases) and self.ends_at > time.monotonic():
            sitting = _CheckSession(self, group, first=done)
            for check in sitting.checks():
                done += 1
                yield check
            cases = sitting.cases or cases
        for case in cases[done:]:
            yield _check(group, case, skipped(f"the budget of {self.budget_seconds:.0f} s was used up"))

    def environment(self, group: CheckGroup) -> dict[str, str]:
        """The variables of a group's processes."""
        scratch = {} if self.scratch is None else {"TMPDIR": str(self.scratch)}
        return env.child_environment(**{**group.environment, **scratch})

    def words(self, group: CheckGroup, *, first: int) -> list[str]:
        """The command line of a process that begins with that case."""
        words = [group.table, "--device", self.device, "--first", str(first)]
        words += ["--only-quick"] if self.only_quick else []
        return words if self.virtual_mac is None else [*words, "--virtual-mac", str(self.virtual_mac)]


class _CheckSession:
    """One process: it answers for the cases from `first` on, up to all; the last answer may be that it died."""

    def __init__(self, ward: CheckRunner, group: CheckGroup, *, first: int) -> None:
        self.cases: tuple[CheckListing, ...] = ()
        """All cases of the group; empty when the table could not be read."""
        self._ward, self._group, self._first = ward, group, first

    def checks(self) -> Iterator[CheckResult]:
        group = self._group
        words, environment = self._ward.words(group, first=self._first), self._ward.environment(group)
        with JsonWorker("whet.doctor.runner", words, mark=MARK, environment=environment) as process:
            listed = process.answer(self._to_start())
            if not isinstance(listed, dict):
                if self._is_over():
                    return
                yield _check(group, _UNKNOWN, failed(f"the checks could not be loaded: {process.last_words()}"))
                return
            self.cases = tuple(CheckListing.model_validate(case) for case in listed["cases"])
            opened = process.answer(self._to_start())
            if not isinstance(opened, dict) or "ready" not in opened:
                if self._is_over():
                    return
                refused = opened.get("refused") if isinstance(opened, dict) else None
                why = f"{self._ward.device} could not be opened: {refused or process.last_words()}"
                yield from (_check(group, case, failed(why)) for case in self.cases[self._first :])
                return
            for case in self.cases[self._first :]:
                left = self._ward.ends_at - time.monotonic()
                if left <= 0:
                    return
                start = time.monotonic()
                answer = process.answer(min(case.limit_seconds, left))
                seconds = time.monotonic() - start
                if isinstance(answer, dict):
                    yield _check(group, case, _finding(answer, process), seconds=float(answer["seconds"]))
                    continue
                yield _check(group, case, self._no_answer(case, answer, process, left, seconds), seconds=seconds)
                return

    def _is_over(self) -> bool:
        """Whether the time is up: then nothing is known about what was not reached."""
        return self._ward.ends_at <= time.monotonic()

    def _to_start(self) -> float:
        return min(START_SECONDS, max(0.0, self._ward.ends_at - time.monotonic()))

    def _no_answer(
        self, case: CheckListing, answer: str, process: JsonWorker, left: float, seconds: float
    ) -> CheckFinding:
        if answer == "dead":
            return failed(f"the process died: {process.last_words()}", outcome="died")
        if left < case.limit_seconds:
            return skipped(f"cut after {seconds:.0f} s: the budget of {self._ward.budget_seconds:.0f} s was used up")
        return failed(f"no answer after {seconds:.0f} s; the process was ended", outcome="hung")


def _finding(answer: dict[str, Any], process: JsonWorker) -> CheckFinding:
    found = CheckFinding.model_validate(answer["finding"])
    fault = _silent_fault(process, answer["stderr_bytes"])
    if fault is None:
        return found
    return failed(f"the GPU reported: {fault}", **{**found.figures, "outcome": "silent fault"})


def _silent_fault(process: JsonWorker, size: int) -> str | None:
    """What the driver complained about until stderr had that size, although Python saw no error."""
    lines = process.said_since(size).splitlines()
    return next((line.strip()[:300] for line in lines if any(fault in line for fault in _SILENT_FAULTS)), None)


def _check(group: CheckGroup, case: CheckListing, found: CheckFinding, *, seconds: float = 0.0) -> CheckResult:
    return CheckResult(
        group=group.name,
        name=case.name,
        seconds=round(seconds, 3),
        issue=case.issue,
        verdict=found.verdict,
        what=found.what,
        figures=found.figures,
    )
