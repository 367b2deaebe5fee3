"""whet runs: what lies in a folder of runs."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from whet.report.run_status import RunStatus


def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that holds the runs.")] = Path("runs"),
    prune: Annotated[bool, typer.Option("--prune", help="Remove runs that never made a step, and left-overs.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """The runs in a folder; --prune tidies up.

    \b
    whet runs
    whet runs experiments --prune
    """
    from whet.base.errors import UsageError
    from whet.cli import console
    from whet.report.run_status import list_runs
    from whet.run.folder import run_groups
    from whet.run.prune import prune as prune_runs

    if folder.exists() and not folder.is_dir():
        raise UsageError("runs lie in a folder", got=str(folder), try_="whet runs DIR")
    removed = prune_runs(folder) if prune and folder.exists() else ()
    found = list_runs(folder) if folder.exists() else ()
    if json:
        listed = {"runs": [run.as_json() for run in found]}
        if prune:
            listed["pruned"] = [gone.as_json() for gone in removed]
        console.result_json(listed)
        return
    for gone in removed:
        console.note(f"removed {gone.path}: {gone.reason}")
    groups = run_groups(folder)
    if found:
        header = ("run", "state", "step", "loss", "goal", "age", "size")
        console.result(console.table(header, [_row(run) for run in found]))
    elif not groups:
        console.note(f"no runs in {folder}")
    for run in found:
        if run.problem:
            console.note(f"{run.path}: {run.problem}")
    for path, number in groups.items():
        console.note(f"{path} holds {number:,} more: whet runs {shlex.quote(str(path))}")


def _row(run: "RunStatus") -> tuple[str, ...]:
    import time

    from whet.base.units import format_bytes, format_seconds

    goal = f"{run.goal} {run.goal_value:.4g}" if run.goal and run.goal_value is not None else "-"
    return (
        str(run.path),
        run.state,
        f"{run.step:,}/{run.total_steps:,}" if run.total_steps else f"{run.step:,}",
        "-" if run.loss is None else f"{run.loss:.4g}",
        goal,
        format_seconds(max(0.0, time.time() - run.updated)),
        format_bytes(run.size_bytes or 0),
    )
