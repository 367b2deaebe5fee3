"""Render a doctor report as text, with one line per group, and all problems."""

from collections import Counter
from collections.abc import Iterator, Sequence

from whet.base.units import format_seconds
from whet.doctor.check import CheckResult, Verdict
from whet.doctor.report import DoctorReport
from whet.machine.render import machine_line, system_state_lines

_ORDER: tuple[Verdict, ...] = ("good", "differs", "failed", "not applicable", "skipped")
# Problems beyond this number are only counted.
_MAX_LINES = 25
# The load per core above which speeds are unreliable.
_BUSY_LOAD = 0.5


def render_report(report: DoctorReport) -> Iterator[str]:
    """Yield all lines of a report."""
    yield f"machine   {machine_line(report.machine)}"
    simulated = ", SIMULATED on this computer's CPU: nothing here is about a real Mac" if report.is_virtual else ""
    yield f"device    {report.device}{simulated}"
    yield from system_state_lines(report.system_state)
    if report.num_busy_processes or (report.load_per_core or 0) > _BUSY_LOAD:
        yield f"busy      {_describe_load(report)}: speeds are lower than they could be"
    if report.system_state_after.thermal != report.system_state.thermal:
        yield f"after     thermal pressure {report.system_state_after.thermal or 'unknown'}"
    yield ""
    for name in dict.fromkeys(result.group for result in report.checks):
        yield render_group(name, [result for result in report.checks if result.group == name])
    yield ""
    for result in report.checks:
        if result.group == "speeds" and result.verdict == "good":
            yield f"{result.name:<28}  {result.what}"
    yield from _section("problems", report.problems)
    yield from _section("skipped", [result for result in report.checks if result.verdict == "skipped"])
    missing = [result.name for result in report.checks if result.figures.get("outcome") == "missing"]
    if missing:
        yield ""
        yield f"missing on {report.device}: {', '.join(missing)}"


def _describe_load(report: DoctorReport) -> str:
    load = "unknown" if report.load_per_core is None else f"{report.load_per_core:.1f}"
    count = report.num_busy_processes
    if not count:
        # This is possible, because the load is a mean over a minute, and many small processes add up.
        return f"load {load} per core in the last minute, though no single process is heavy now"
    return f"{count} heavy process{'' if count == 1 else 'es'}, load {load} per core"


def render_group(name: str, results: Sequence[CheckResult]) -> str:
    """Return the line of a group, which counts its checks by verdict.

    >>> render_group("parity", [CheckResult(group="parity", name="x", verdict="good", what="", seconds=2.0)])
    'parity       1 good, in 2.0 s'
    """
    verdicts = Counter(result.verdict for result in results)
    shown = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in _ORDER if verdicts[verdict])
    return f"{name:<11}  {shown}, in {format_seconds(sum(result.seconds for result in results))}"


def conclusion(report: DoctorReport) -> str:
    """Return the last line of the report."""
    if report.problems:
        return f"{len(report.problems)} of {len(report.checks)} checks found a problem"
    num_skipped = sum(result.verdict == "skipped" for result in report.checks)
    return "no problems found" + (f", but {num_skipped} checks were skipped" if num_skipped else "")


def _section(title: str, results: Sequence[CheckResult]) -> Iterator[str]:
    if not results:
        return
    yield ""
    yield f"{title}:"
    for result in results[:_MAX_LINES]:
        yield f"  {result.group}, {result.name}: {result.what}"
    if len(results) > _MAX_LINES:
        yield f"  and {len(results) - _MAX_LINES} more; --json FILE holds all"
