"""`whet runs`: list the runs of a folder."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whet.base.errors import UsageError
from whet.base.units import format_bytes, format_seconds, printable_line
from whet.cli import output
from whet.cli.options import Json

if TYPE_CHECKING:
    from whet.report.run_status import RunStatus

_CURVE_WIDTH = 12


def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that contains the runs.")] = Path("runs"),
    json: Json = False,
) -> None:
    """List the runs of a folder.

    \b
    whet runs
    whet runs experiments
    """
    from whet.report.run_status import list_runs
    from whet.run.folder import run_groups, shell_path

    if folder.exists() and not folder.is_dir():
        raise UsageError("not a folder", got=str(folder), try_="whet runs DIR")
    listed = list_runs(folder) if folder.exists() else ()
    if json:
        output.result_json({"runs": [run.as_json() for run in listed]})
        return
    groups = run_groups(folder)
    if listed:
        header = ("run", "state", "step", "loss", "curve", "goal", "age", "size")
        output.result(output.table(header, [_row(run) for run in listed]))
    elif not groups:
        output.note(f"no runs in {folder}")
    for run in listed:
        if run.problem:
            output.note(f"{printable_line(str(run.path))}: {run.problem}")
    for path, number in groups.items():
        output.note(printable_line(f"{path} contains {number:,} more: whet runs {shell_path(path)}"))


def _row(run: "RunStatus") -> tuple[str, ...]:
    from whet.report.run_status import loss_text
    from whet.report.text_chart import sparkline

    goal = f"{run.goal} {run.goal_value:.4g}" if run.goal and run.goal_value is not None else "-"
    return (
        str(run.path),
        run.state,
        f"{run.step:,}/{run.total_steps:,}" if run.total_steps else f"{run.step:,}",
        loss_text(run) or "-",
        sparkline(run.sparkline, width=_CURVE_WIDTH, unicode=output.supports_unicode()),
        goal,
        format_seconds(max(0.0, time.time() - run.updated)),
        format_bytes(run.size_bytes or 0),
    )
