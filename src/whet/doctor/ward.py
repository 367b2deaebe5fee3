"""How are checks kept from harming each other and us? A process for each group, a limit for each check.

A process that dies or hangs in a check is a finding of that check; the checks behind it go on in a new process.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.base import env
from whet.base.record import Record
from whet.doctor.case import Check, Finding, Group, failed, skipped
from whet.doctor.child import MARK
from whet.measure.answering import AnsweringProcess

START_SECONDS = 90.0
"""For loading torch and opening the device, at the worst."""
_SILENT_FAULTS = ("command buffer exited with error status", "Execution of the command buffer was aborted")
"""Metal prints these and lets the program go on with whatever is in memory (MPSStream.mm of torch 2.13)."""


class Listed(Record):
    """A case as its process describes it."""

    name: str
    limit_seconds: float
    is_quick: bool
    issue: int | None


_UNKNOWN = Listed(name="all", limit_seconds=0, is_quick=True, issue=None)
"""Stands for the cases of a group whose table could not be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ward:
    """Where and for how long the checks run."""

    device: str
    ends_at: float
    """On the monotonic clock."""
    budget_seconds: float
    virtual_mac: Path | None = None
    only_quick: bool = False
    scratch: Path | None = None
    """Where the processes put what they write; one that is ended cannot tidy up behind itself."""

    def run(self, group: Group) -> Iterator[Check]:
        """The checks of one group as they are done."""
        done = 0
        cases: tuple[Listed, ...] = (_UNKNOWN,)
        while done < len(cases) and self.ends_at > time.monotonic():
            sitting = _Sitting(self, group, first=done)
            for check in sitting.checks():
                done += 1
                yield check
            cases = sitting.cases or cases
        for case in cases[done:]:
            yield _check(group, case, skipped(f"the budget of {self.budget_seconds:.0f} s was used up"))

    def environment(self, group: Group) -> dict[str, str]:
        """The variables of a group's processes."""
        scratch = {} if self.scratch is None else {"TMPDIR": str(self.scratch)}
        return env.for_child(**{**group.environment, **scratch})

    def words(self, group: Group, *, first: int) -> list[str]:
        """The command line of a process that begins with that case."""
        words = [group.table, "--device", self.device, "--first", str(first)]
        words += ["--only-quick"] if self.only_quick else []
        return words if self.virtual_mac is None else [*words, "--virtual-mac", str(self.virtual_mac)]


class _Sitting:
    """One process: it answers for the cases from `first` on, up to all; the last answer may be that it died."""

    def __init__(self, ward: Ward, group: Group, *, first: int) -> None:
        self.cases: tuple[Listed, ...] = ()
        """All cases of the group; empty when the table could not be read."""
        self._ward, self._group, self._first = ward, group, first

    def checks(self) -> Iterator[Check]:
        group = self._group
        words, environment = self._ward.words(group, first=self._first), self._ward.environment(group)
        with AnsweringProcess("whet.doctor.child", words, mark=MARK, environment=environment) as process:
            listed = process.answer(self._to_start())
            if not isinstance(listed, dict):
                if self._is_over():
                    return
                yield _check(group, _UNKNOWN, failed(f"the checks could not be loaded: {process.last_words()}"))
                return
            self.cases = tuple(Listed.model_validate(case) for case in listed["cases"])
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

    def _no_answer(self, case: Listed, answer: str, process: AnsweringProcess, left: float, seconds: float) -> Finding:
        if answer == "dead":
            return failed(f"the process died: {process.last_words()}", outcome="died")
        if left < case.limit_seconds:
            return skipped(f"cut after {seconds:.0f} s: the budget of {self._ward.budget_seconds:.0f} s was used up")
        return failed(f"no answer after {seconds:.0f} s; the process was ended", outcome="hung")


def _finding(answer: dict[str, Any], process: AnsweringProcess) -> Finding:
    found = Finding.model_validate(answer["finding"])
    fault = _silent_fault(process, answer["stderr_bytes"])
    if fault is None:
        return found
    return failed(f"the GPU reported: {fault}", **{**found.figures, "outcome": "silent fault"})


def _silent_fault(process: AnsweringProcess, size: int) -> str | None:
    """What the driver complained about until stderr had that size, although Python saw no error."""
    lines = process.said_since(size).splitlines()
    return next((line.strip()[:300] for line in lines if any(fault in line for fault in _SILENT_FAULTS)), None)


def _check(group: Group, case: Listed, found: Finding, *, seconds: float = 0.0) -> Check:
    return Check(
        group=group.name,
        name=case.name,
        seconds=round(seconds, 3),
        issue=case.issue,
        verdict=found.verdict,
        what=found.what,
        figures=found.figures,
    )
