"""`whet doctor`: test a device."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whet.base.errors import UsageError
from whet.cli import output
from whet.cli.options import Device

if TYPE_CHECKING:
    from whet.doctor.check import CheckResult


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
    from whet.doctor.render import conclusion, render_group, render_report
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
    output.result("\n".join([*render_report(report), "", conclusion(report)]))
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
