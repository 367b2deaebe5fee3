"""whet export: the numbers of a run, or its model, for other programs."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    to: Annotated[
        str,
        typer.Option("--to", metavar="FORMAT", help="csv, parquet or tensorboard; of the model transformers or onnx."),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder to write; NAME-FORMAT where you are if not given.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what an earlier export wrote there.")] = False,
    checkpoint: Annotated[str, typer.Option(metavar="best|last|STEP", help="Of the model: which weights.")] = "best",
    recipe: Annotated[
        str | None, typer.Option(metavar="FILE", help="Of the model: your recipe's file, if it is not a built-in one.")
    ] = None,
) -> None:
    """Write the numbers of a run as CSV, Parquet or TensorBoard files, or its model for transformers or ONNX.

    \b
    whet export runs/text-001 --to csv
    whet export runs/text-001 --to tensorboard --out boards/text-001
    whet export runs/text-001 --to transformers --out models/mine

    Steps and evaluations as the run counts them: what was made again after a resume is there once. A model has the
    best weights unless you say otherwise, and lies beside whet-export.json, which says what it is.
    """
    from whet.base.units import format_bytes
    from whet.cli import console
    from whet.report.export.files import MODEL_FORMATS
    from whet.report.export.files import export_run as write

    if to in MODEL_FORMATS:
        from whet.api.export import export_model

        written = export_model(run, to=to, out=out, force=force, checkpoint=checkpoint, recipe=recipe)
    else:
        written = write(run, to=to, out=out, force=force)
    folder = out or written.folder.name
    for name, size in written.files.items():
        console.result(f"{folder}/{name}  {format_bytes(size)}")
    if to == "tensorboard":
        console.note(f"to look at it: tensorboard --logdir {folder}")
