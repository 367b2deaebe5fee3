"""`whet search`: hyperparameter search with one run per trial."""

import contextlib
import shlex
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from whet.base.process import handle_signals, stop_immediately, stop_message
from whet.base.units import format_seconds
from whet.cli import output
from whet.cli.options import Device, Json

if TYPE_CHECKING:
    from whet.hpo.worker import FinishedTrial
    from whet.run.search_result import SearchResult


def search(
    target: Annotated[
        str, typer.Argument(metavar="RECIPE|FILE", help="text, chat, puzzle, hex, or a Python file with recipe().")
    ],
    space: Annotated[
        list[str] | None,
        typer.Argument(metavar="SPACE", help="lr=1e-5..1e-3:log, arch.layers=[1,2]; epochs=2 is fixed for all trials."),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Total number of trials, over all processes.")] = 20,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=1, help="Stop after this time; the same command resumes.")
    ] = None,
    subset: Annotated[
        float,
        typer.Option(min=0.0001, max=1, help="Share of the training data that trials use; validation stays complete."),
    ] = 1.0,
    seeds: Annotated[
        int, typer.Option(min=0, help="Retrain the best 3 with this many other seeds before choosing a winner.")
    ] = 3,
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="postgresql+psycopg://... Default: a journal file."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Parallel trials: on the CPU, or one per GPU.")] = 1,
    name: Annotated[
        str | None, typer.Option(help="The search is in runs/NAME; the same name resumes or joins it.")
    ] = None,
    sampler: Annotated[str, typer.Option(help="An Optuna sampler; options follow colons.")] = "TPESampler",
    pruner: Annotated[str, typer.Option(help="An Optuna pruner; NopPruner for none.")] = "PercentilePruner",
    config: Annotated[
        Path | None,
        typer.Option("--config", "--config-name", metavar="FILE", help="Read space and settings from TOML or YAML."),
    ] = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Search for the best settings, with confidence intervals.

    \b
    whet search text lr=1e-5..1e-2:log --trials 12
    whet search text lr=1e-5..1e-2:log arch.layers=[1,2] epochs=3 --subset 0.2 --name reviews
    whet train text --from-search reviews

    Optuna proposes settings. Every trial is a run folder in runs/NAME, trained in a separate process on the same split.
    Trials that fall behind are pruned. A trial that runs out of memory counts as infeasible on this machine, not as a
    bad result. A trial that is killed resumes from its checkpoint. The best three are retrained with other seeds before
    a winner is chosen. Only the final training run uses the test split.
    """
    from whet.api.search import prepare_search, run_search
    from whet.report.search_report import render_search
    from whet.run.folder import short_path

    prepared = prepare_search(
        target,
        space or (),
        file=config,
        name=name,
        subset=subset,
        seeds=seeds,
        sampler=sampler,
        pruner=pruner,
        device=device,
    )
    folder = short_path(prepared.folder)
    output.note(f"search    {folder}: {' '.join(prepared.config.space.arguments)}")
    output.note(f"watch     whet watch {shlex.quote(folder)} shows the trials while they train")
    stop = threading.Event()
    with _stop_on_signals(stop) as signals:
        result = run_search(
            prepared,
            trials=trials,
            timeout=timeout,
            storage=storage,
            jobs=jobs,
            log=output.note,
            on_trial=_print_trial,
            stop=stop,
        )
    if json:
        output.result_json(result.as_json())
    else:
        output.result(render_search(result))
    num_ended = sum(trial.state not in ("running", "waiting") for trial in result.trials)
    is_unconfirmed = bool(seeds and result.candidates) and not result.is_confirmed
    is_incomplete = num_ended < prepared.num_trials(trials) or is_unconfirmed
    _print_next(result, prepared.folder, target, name=name, is_incomplete=is_incomplete)
    if signals:
        raise typer.Exit(128 + signals[0])


def _print_next(result: "SearchResult", folder: Path, target: str, *, name: str | None, is_incomplete: bool) -> None:
    """Print the command that resumes the search or trains with its winner, and the one that prints the report."""
    from whet.run.folder import short_path

    if is_incomplete:
        with_name = "" if name else f" with --name {shlex.quote(folder.name)}"
        output.note(f"resume    run the same command{with_name} to continue")
    elif result.winner is not None:
        command = f"whet train {target} --from-search {shlex.quote(folder.name)}"
        output.note(f"next      {command}   (all training data, and the test)")
    output.note(f"report    whet report {shlex.quote(short_path(folder))} prints it again")


def _print_trial(trial: "FinishedTrial") -> None:
    from whet.report.search_report import format_settings

    value = "" if trial.value is None or trial.state == "infeasible" else f"  {trial.value:.4g}"
    details = f"  {trial.message}" if trial.message else ""
    spent = f"{trial.steps:,} steps, {format_seconds(trial.seconds)}"
    if trial.part == "seed":
        title, settings = f"seed {trial.parameters['seed']} of trial {trial.parameters['trial']}", ""
    else:
        title, settings = f"trial {trial.number}", f"  {format_settings(dict(trial.parameters))}"
    output.note(f"{title:<9} {trial.state:<11}{value}{settings}  ({spent}){details}")


@contextlib.contextmanager
def _stop_on_signals(stop: threading.Event) -> Iterator[list[int]]:
    """Let running trials save and stop on Ctrl-C or SIGTERM. Yield a list to which received signals are appended."""
    received: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        if received:
            stop_immediately(number)
        received.append(number)
        stop.set()
        # Python raises RuntimeError if a signal handler writes to a stream during another write to it.
        with contextlib.suppress(RuntimeError):
            output.note(stop_message(number, when="once the running trials are saved"))

    with handle_signals(handle, signal.SIGINT, signal.SIGTERM):
        yield received
