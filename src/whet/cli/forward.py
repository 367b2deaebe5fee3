"""whet forward: a run to W&B, Trackio or MLflow, from outside of the training."""

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from whet.base.process import stop_immediately


def forward(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, of a live or a finished run.")],
    to: Annotated[str, typer.Option("--to", metavar="DASHBOARD", help="wandb, trackio or mlflow.")],
    project: Annotated[str, typer.Option(metavar="NAME", help="The project, or experiment, there.")] = "whet",
    once: Annotated[bool, typer.Option("--once", help="Forward what is there now, and do not wait for more.")] = False,
) -> None:
    """Forward a run to W&B, Trackio or MLflow, while it trains or later.

    \b
    whet forward runs/text-001 --to trackio
    WANDB_MODE=offline whet forward runs/text-001 --to wandb --project reviews

    It reads the run folder in a process of its own: a dashboard that is slow or gone waits for nobody but this
    command. Ctrl-C stops it; the same command goes on with what is missing there.
    """
    from whet.base.errors import WhetError
    from whet.cli import console
    from whet.report.forward.dashboards import UnreachableError, open_dashboard
    from whet.report.forward.forwarder import forward_run as send
    from whet.run.folder import open_run

    opened = open_run(run)
    stop = threading.Event()
    asked: list[int] = []

    def ask(number: int, _frame: object) -> None:
        asked.append(number)
        stop.set()
        if len(asked) > 1:
            stop_immediately(number)

    with console.user_output_to_stderr():
        target = open_dashboard(to)
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            done = send(
                opened, target, project=project, once=once, tries=3 if once else None, say=console.note, stop=stop
            )
        except UnreachableError as error:
            raise WhetError(f"{to} does not answer", got=str(error), try_="the same command again, later") from error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    last = "" if done.last_step is None else f", up to step {done.last_step:,}"
    console.result(f"forwarded {done.rows:,} steps{last}" + (f"; the run is {done.state}" if done.state else ""))
    if asked:
        raise typer.Exit(128 + asked[0])
