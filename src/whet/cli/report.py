"""whet report: what a run did."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """What a run did, and how to go on.

    \b
    whet report runs/text-001
    """
    from whet.cli import screen
    from whet.report.summary import summarize
    from whet.report.text import render

    found = summarize(run)
    if json:
        screen.result_json(found.as_json())
    else:
        screen.result(render(found, width=screen.width(), unicode=screen.speaks_unicode()))
