"""A doctor report as lines of text."""

from collections import Counter
from collections.abc import Iterator, Sequence

from whet.base.units import format_seconds
from whet.doctor.check import CheckResult, Verdict
from whet.doctor.examination import DoctorReport
from whet.machine.render import conditions_lines, machine_line

_ORDER: tuple[Verdict, ...] = ("good", "differs", "failed", "not applicable", "skipped")
_MOST_LINES = 25
_BUSY = 0.5
"""The load of each core from which speeds are not to be trusted."""


def render_report(examination: DoctorReport) -> Iterator[str]:
    """All of it."""
    yield f"machine   {machine_line(examination.machine)}"
    simulated = ", SIMULATED on this computer's CPU: nothing here is about a real Mac" if examination.is_virtual else ""
    yield f"device    {examination.device}{simulated}"
    yield from conditions_lines(examination.conditions)
    if examination.num_busy_processes or (examination.load_per_core or 0) > _BUSY:
        yield f"busy      {_others(examination)}: speeds are lower than they could be"
    if examination.conditions_after.thermal != examination.conditions.thermal:
        yield f"after     thermal pressure {examination.conditions_after.thermal or 'unknown'}"
    yield ""
    for name in dict.fromkeys(check.group for check in examination.checks):
        yield render_group(name, [check for check in examination.checks if check.group == name])
    yield ""
    for check in examination.checks:
        if check.group == "speeds" and check.verdict == "good":
            yield f"{check.name:<28}  {check.what}"
    yield from _chapter("to look at", examination.trouble)
    yield from _chapter("skipped", [check for check in examination.checks if check.verdict == "skipped"])
    missing = [check.name for check in examination.checks if check.figures.get("outcome") == "missing"]
    if missing:
        yield ""
        yield f"missing on {examination.device}: {', '.join(missing)}"


def _others(examination: DoctorReport) -> str:
    load = "unknown" if examination.load_per_core is None else f"{examination.load_per_core:.1f}"
    count = examination.num_busy_processes
    if not count:
        # A load is a mean over a minute, and many small processes make one too.
        return f"load {load} for each core in the last minute, though no single process is heavy now"
    return f"{count} heavy process{'' if count == 1 else 'es'}, load {load} for each core"


def render_group(name: str, checks: Sequence[CheckResult]) -> str:
    """How many of a group are good, differ, and so on.

    >>> group_line("parity", [Check(group="parity", name="x", verdict="good", what="", seconds=2.0)])
    'parity       1 good, in 2.0 s'
    """
    counts = Counter(check.verdict for check in checks)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _ORDER if counts[verdict])
    return f"{name:<11}  {said}, in {format_seconds(sum(check.seconds for check in checks))}"


def conclusion(examination: DoctorReport) -> str:
    """The last line."""
    if examination.trouble:
        return f"{len(examination.trouble)} of {len(examination.checks)} checks found something"
    left_out = sum(check.verdict == "skipped" for check in examination.checks)
    return "nothing was found" + (f", but {left_out} checks were skipped" if left_out else "")


def _chapter(title: str, checks: Sequence[CheckResult]) -> Iterator[str]:
    if not checks:
        return
    yield ""
    yield f"{title}:"
    for check in checks[:_MOST_LINES]:
        yield f"  {check.group}, {check.name}: {check.what}"
    if len(checks) > _MOST_LINES:
        yield f"  and {len(checks) - _MOST_LINES} more; --json FILE holds all"
