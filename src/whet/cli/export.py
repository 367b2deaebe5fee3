"""`whet export`, `whet import` and `whet forward`: exchange runs and weights with other tools."""

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from whet.base.errors import UsageError, WhetError
from whet.base.process import handle_signals, stop_immediately
from whet.base.units import format_bytes
from whet.cli import output
from whet.cli.options import Checkpoint, Json, ModelFunction, RecipeFile


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="Metrics: csv or tensorboard. The model: safetensors, transformers or onnx.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder to write. Default: NAME-FORMAT in this folder.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    checkpoint: Checkpoint = "best",
    recipe: RecipeFile = None,
    model: ModelFunction = None,
) -> None:
    """Export the metrics of a run, or its model.

    \b
    whet export runs/text-001 --to csv
    whet export runs/text-001 --to tensorboard --out boards/text-001
    whet export runs/text-001 --to transformers --out models/mine
    whet export runs/mine --to safetensors
    whet export runs/mine --to transformers --model train.py:make_model

    Steps that were repeated after resuming appear once. By default, a model is exported with its best weights. The file
    whet-export.json describes the export.
    """
    from whet.report.export.files import MODEL_FORMATS, export_run

    if to in MODEL_FORMATS:
        from whet.api.export import export_model
        from whet.run.folder import locate_checkpoint

        run, checkpoint = locate_checkpoint(run, checkpoint)
        with output.user_output_to_stderr():
            written = export_model(run, to=to, out=out, force=force, checkpoint=checkpoint, recipe=recipe, model=model)
    else:
        written = export_run(run, to=to, out=out, force=force)
    folder = out or written.folder.name
    for name, size in written.files.items():
        output.result(f"{folder}/{name}  {format_bytes(size)}")
    if to == "tensorboard":
        output.note(f"to view it: tensorboard --logdir {folder}")


def import_weights(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .pt, .pth, .bin, .ckpt or .safetensors file.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to create.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="With --format trm: data=DIR, arch.* and others.")
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", metavar="trm", help="Make a run from a checkpoint of the official TRM code."),
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="NAME", help="Key of the weights in the file, such as model or ema.shadow.")
    ] = None,
    json: Json = False,
) -> None:
    """Convert weights from other tools to safetensors.

    \b
    whet import model.pt --out imported/model
    whet train my_recipe.py init_from=imported/model
    whet import checkpoints/step_65104 --format trm data=data/sudoku --out runs/trm

    With --format trm, the result is a run of the puzzle recipe, evaluated on the data. Use it with whet predict, or
    fine-tune it with whet train puzzle init_from=RUN.

    A torch file is read by a separate process with resource limits, which rejects files that contain anything but
    tensors. This limits the risk, but does not eliminate it, so import only files that you trust. No other command of
    whet reads such files.
    """
    from whet.checkpoint.importer import import_weights as convert

    if format_ is not None or settings:
        _import_trm(file, out, format_=format_, settings=settings or [], json=json)
        return
    imported = convert(file, out, key=key)
    if json:
        output.result_json(imported.as_json())
        return
    source = f" from {imported.key!r}" if imported.key else ""
    lines = [f"imported  {len(imported.taken):,} tensors, {format_bytes(imported.size)}{source}"]
    if imported.wrapper:
        lines.append(f"names     without their common prefix {imported.wrapper!r}")
    if imported.left_out:
        names = ", ".join(f"{name} ({why})" for name, why in list(imported.left_out.items())[:5])
        more = f" and {len(imported.left_out) - 5:,} more" if len(imported.left_out) > 5 else ""
        lines.append(f"skipped   {names}{more}")
    lines.append(f"folder    {out}; init_from={out} starts a run with these weights")
    output.result("\n".join(lines))


def _import_trm(file: Path, out: Path, *, format_: str | None, settings: list[str], json: bool) -> None:
    if format_ != "trm":
        raise UsageError("no such format", got=f"--format {format_}", try_="--format trm, or neither --format nor keys")
    from whet.recipes.puzzle.official import import_official

    metrics = import_official(file, out, words=settings)
    if json:
        output.result_json({"run": str(out), "metrics": metrics})
        return
    shown = {name: value for name, value in metrics.items() if not name.rpartition("_")[2].isdigit()}
    output.result(
        "\n".join(
            [
                f"imported  {file} as the run {out}",
                "metrics   " + ", ".join(f"{name} {value:.4g}" for name, value in shown.items()),
                f"next      whet report {out}; whet train puzzle data=DIR init_from={out} fine-tunes it",
            ]
        )
    )


def forward(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, of a running or a finished run.")],
    to: Annotated[str, typer.Option("--to", metavar="DASHBOARD", help="wandb or mlflow.")],
    project: Annotated[str, typer.Option(metavar="NAME", help="The project or experiment on the dashboard.")] = "whet",
    once: Annotated[bool, typer.Option("--once", help="Forward what exists now and exit.")] = False,
) -> None:
    """Forward a run to W&B or MLflow.

    \b
    whet forward runs/text-001 --to mlflow
    WANDB_MODE=offline whet forward runs/text-001 --to wandb --project reviews

    Works during and after training. This command is a separate process that reads the run folder, so a slow dashboard
    cannot slow down training. Ctrl-C stops it. Run the same command again to forward what is missing.
    """
    from whet.report.forward.dashboards import UnreachableError, open_dashboard
    from whet.report.forward.forwarder import forward_run
    from whet.run.folder import open_run

    opened = open_run(run)
    stop = threading.Event()
    signals: list[int] = []

    def handle(number: int, _frame: object) -> None:
        signals.append(number)
        stop.set()
        if len(signals) > 1:
            stop_immediately(number)

    with output.user_output_to_stderr(), handle_signals(handle, signal.SIGINT, signal.SIGTERM):
        dashboard = open_dashboard(to)
        try:
            done = forward_run(
                opened, dashboard, project=project, once=once, tries=3 if once else None, notify=output.note, stop=stop
            )
        except UnreachableError as error:
            raise WhetError(
                f"{to} does not respond", got=str(error), try_="run the same command again later"
            ) from error
    last = "" if done.last_step is None else f", up to step {done.last_step:,}"
    output.result(f"forwarded {done.rows:,} steps{last}" + (f"; the run is {done.state}" if done.state else ""))
    if signals:
        raise typer.Exit(128 + signals[0])
