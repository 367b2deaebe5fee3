"""whet export: the numbers of a run for other programs."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="csv, parquet or tensorboard.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder to write; NAME-FORMAT where you are if not given.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what an earlier export wrote there.")] = False,
) -> None:
    """Write the numbers of a run as CSV, Parquet or TensorBoard files.

    \b
    whet export runs/text-001 --to csv
    whet export runs/text-001 --to tensorboard --out boards/text-001

    Steps and evaluations as the run counts them: what was made again after a resume is there once.
    """
    from whet.base.units import show_bytes
    from whet.cli import screen
    from whet.report.export.exporting import export as write

    written = write(run, to=to, out=out, force=force)
    folder = out or written.folder.name
    for name, size in written.files.items():
        screen.result(f"{folder}/{name}  {show_bytes(size)}")
    if to == "tensorboard":
        screen.note(f"to look at it: tensorboard --logdir {folder}")
