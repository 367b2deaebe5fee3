"""whet doctor: is this device complete, right, exact, and how fast?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from whet.doctor.check import CheckResult


def doctor(
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all findings to share.")] = None,
    device: Annotated[str, typer.Option(help="auto, mps, cuda, cuda:1 or cpu.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A fifth of the checks.")] = False,
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="What is not done by then is skipped.")] = 120.0,
) -> None:
    """Examine this device: operators, known bugs, parity with the CPU, resume, speed.

    \b
    whet doctor
    whet doctor --json doctor.json
    whet doctor --device cpu --quick

    Takes two minutes at most. The file names neither you nor your computer. Exit code 1: something was found.
    """
    from whet.base.errors import UsageError
    from whet.cli import console
    from whet.doctor.examination import examine_device, report_bytes
    from whet.doctor.render import conclusion, render_group, render_report
    from whet.run.durable import write_file

    if json is not None and (json.is_dir() or not json.parent.is_dir()):
        raise UsageError("the file cannot be written there", got=str(json), try_="a file name in a folder that exists")
    if not budget > 0:
        raise UsageError("the budget must be above 0 seconds", got=str(budget), try_="--budget 120")
    done: list[CheckResult] = []

    def show(group: str, check: "CheckResult | None") -> None:
        if check is not None:
            done.append(check)
            return
        if done:
            console.note(render_group(done[0].group, done))
            done.clear()
        console.note(f"{group} ...")

    found = examine_device(device, budget_seconds=budget, quick=quick, show=show)
    if done:
        console.note(render_group(done[0].group, done) + "\n")
    console.result("\n".join([*render_report(found), "", conclusion(found)]))
    if json is None:
        console.note("whet doctor --json doctor.json writes all of it to a file; attach that to an issue")
    else:
        target = json.resolve()
        if target.exists() and not target.is_file():
            # A pipe or /dev/stdout: written to, never replaced.
            target.write_bytes(report_bytes(found))
        else:
            write_file(target, data=report_bytes(found))
        console.note(f"{json} holds all of it, without names or paths; attach it to an issue")
    if found.trouble:
        raise typer.Exit(1)
