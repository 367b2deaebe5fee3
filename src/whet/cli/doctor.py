"""whet doctor: is this device complete, right, exact, and how fast?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from whet.doctor.case import Check


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
    from whet.cli import screen
    from whet.doctor.examination import as_bytes, examine
    from whet.doctor.words import conclusion, examination_lines, group_line
    from whet.run.durable import write_file

    if json is not None and (json.is_dir() or not json.parent.is_dir()):
        raise UsageError("the file cannot be written there", got=str(json), try_="a file name in a folder that exists")
    if not budget > 0:
        raise UsageError("the budget must be above 0 seconds", got=str(budget), try_="--budget 120")
    done: list[Check] = []

    def show(group: str, check: "Check | None") -> None:
        if check is not None:
            done.append(check)
            return
        if done:
            screen.note(group_line(done[0].group, done))
            done.clear()
        screen.note(f"{group} ...")

    found = examine(device, budget_seconds=budget, quick=quick, show=show)
    if done:
        screen.note(group_line(done[0].group, done) + "\n")
    screen.result("\n".join([*examination_lines(found), "", conclusion(found)]))
    if json is None:
        screen.note("whet doctor --json doctor.json writes all of it to a file; attach that to an issue")
    else:
        target = json.resolve()
        if target.exists() and not target.is_file():
            # A pipe or /dev/stdout: written to, never replaced.
            target.write_bytes(as_bytes(found))
        else:
            write_file(target, data=as_bytes(found))
        screen.note(f"{json} holds all of it, without names or paths; attach it to an issue")
    if found.trouble:
        raise typer.Exit(1)
