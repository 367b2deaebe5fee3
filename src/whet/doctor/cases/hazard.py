"""A known silent bug of a device, made small: what came out, and what should have come out.

The key is the number at pytorch/pytorch under which it is described (an issue, or the pull request that mended it).
Those that were read about only there were never seen here: no Mac was at hand.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from whet.doctor.case import Case, Finding, Place, first_line, not_applicable
from whet.doctor.cases.comparing import compared
from whet.verify.agreement import CLOSE

Try = Callable[[Place], tuple[Any, Any]]


class Hazards:
    """Collects the hazards of one file."""

    def __init__(self) -> None:
        self.cases: list[Case] = []

    def add(
        self,
        issue: int,
        what: str,
        *,
        tolerance: float = CLOSE,
        may_refuse: bool = False,
        is_quick: bool = False,
    ) -> Callable[[Try], Try]:
        """Names what is tried; `may_refuse` where an error is an honest answer of the device."""

        def note(attempt: Try) -> Try:
            run = partial(_judge, attempt, tolerance, may_refuse)
            self.cases.append(Case(name=f"#{issue} {what}", run=run, issue=issue, is_quick=is_quick))
            return attempt

        return note


def _judge(attempt: Try, tolerance: float, may_refuse: bool, place: Place) -> Finding:
    try:
        found, expected = attempt(place)
    except RuntimeError as error:
        if not may_refuse:
            raise
        return not_applicable(f"refused here, not wrong: {first_line(error)}", outcome="refused")
    return compared(found, expected, tolerance=tolerance, right="right here", wrong="wrong here")
