"""`whet doctor`: test a device."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whet.base.errors import UsageError
from whet.base.units import format_seconds
from whet.cli import output
from whet.cli.options import Device

if TYPE_CHECKING:
    from whet.doctor.check import CheckResult, Verdict
    from whet.doctor.report import DoctorReport

_ORDER: "tuple[Verdict, ...]" = ("good", "differs", "failed", "not applicable", "skipped")
# Maximum number of problems to print. Further problems are only counted.
_MAX_LINES = 25
# The load per core above which measured speeds are unreliable.
_BUSY_LOAD = 0.5


def doctor(
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all results to a file.")] = None,
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Run a fifth of the tests.")] = False,
    budget: Annotated[
        float, typer.Option(metavar="SECONDS", help="Skip tests that do not fit into this time.")
    ] = 120.0,
) -> None:
    """Test the operators, CPU parity and speed of this device.

    \b
    whet doctor
    whet doctor --json doctor.json
    whet doctor --device cpu --quick

    Also tests known bugs and exact resuming. Takes at most two minutes by default. The JSON file contains neither your
    name nor that of your computer. The exit code is 1 if there are findings.
    """
    from whet.doctor.report import report_bytes, run_doctor
    from whet.run.durable import write_file

    if json is not None and (json.is_dir() or not json.parent.is_dir()):
        raise UsageError("the file cannot be written there", got=str(json), try_="a file name in an existing folder")
    if not budget > 0:
        raise UsageError("--budget must be above 0 seconds", got=str(budget), try_="--budget 120")
    done: list[CheckResult] = []

    def show(group: str, check: "CheckResult | None") -> None:
        """Print one line per group. Called with None when a group starts, then with each of its results."""
        if check is not None:
            done.append(check)
            return
        if done:
            output.note(render_group(done[0].group, done))
            done.clear()
        output.note(f"{group} ...")

    report = run_doctor(device, budget_seconds=budget, quick=quick, show=show)
    if done:
        output.note(render_group(done[0].group, done) + "\n")
    output.result("\n".join([*render_report(report), "", _conclusion(report)]))
    if json is None:
        output.note("whet doctor --json doctor.json writes all results to a file; attach it to an issue")
    else:
        target = json.resolve()
        if target.exists() and not target.is_file():
            # Write in place: a pipe or /dev/stdout must not be replaced by a file.
            target.write_bytes(report_bytes(report))
        else:
            write_file(target, data=report_bytes(report))
        output.note(f"{json} has all results, without names or paths; attach it to an issue")
    if report.problems:
        raise typer.Exit(1)


# --- Text ------------------------------------------------------------------------------------------------------------


def render_report(report: "DoctorReport") -> Iterator[str]:
    """Yield the lines of the doctor's report."""
    from whet.machine.render import machine_line, system_state_lines

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


def _describe_load(report: "DoctorReport") -> str:
    load = "unknown" if report.load_per_core is None else f"{report.load_per_core:.1f}"
    count = report.num_busy_processes
    if not count:
        # This is possible, because the load is a mean over a minute, and many small processes add up.
        return f"load {load} per core in the last minute, though no single process is heavy now"
    return f"{count} heavy process{'' if count == 1 else 'es'}, load {load} per core"


def render_group(name: str, results: "Sequence[CheckResult]") -> str:
    """Return the line of a group, which counts its checks by verdict.

    >>> from whet.doctor.check import CheckResult
    >>> render_group("parity", [CheckResult(group="parity", name="x", verdict="good", what="", seconds=2.0)])
    'parity       1 good, in 2.0 s'
    """
    verdicts = Counter(result.verdict for result in results)
    shown = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in _ORDER if verdicts[verdict])
    return f"{name:<11}  {shown}, in {format_seconds(sum(result.seconds for result in results))}"


def _conclusion(report: "DoctorReport") -> str:
    """Return the last line of the report, with the number of problems."""
    if report.problems:
        return f"{len(report.problems)} of {len(report.checks)} checks found a problem"
    num_skipped = sum(result.verdict == "skipped" for result in report.checks)
    return "no problems found" + (f", but {num_skipped} checks were skipped" if num_skipped else "")


def _section(title: str, results: "Sequence[CheckResult]") -> Iterator[str]:
    if not results:
        return
    yield ""
    yield f"{title}:"
    for result in results[:_MAX_LINES]:
        yield f"  {result.group}, {result.name}: {result.what}"
    if len(results) > _MAX_LINES:
        yield f"  and {len(results) - _MAX_LINES} more; --json FILE holds all"
