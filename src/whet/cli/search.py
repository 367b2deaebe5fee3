"""whet search: tries settings of a recipe, each in a run of its own, and names the best with its interval."""

import contextlib
import shlex
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from whet.base.process import stop_immediately, stop_message

if TYPE_CHECKING:
    from whet.hpo.worker import FinishedTrial


def search(
    what: Annotated[
        str, typer.Argument(metavar="RECIPE|FILE", help="text, chat, puzzle, hex, or a Python file with recipe().")
    ],
    space: Annotated[
        list[str] | None,
        typer.Argument(metavar="SPACE", help="lr=1e-5..1e-3:log, arch.layers=[1,2]; epochs=2 holds for all."),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="How many in all, by however many processes.")] = 20,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=1, help="Stop then; the same command goes on.")
    ] = None,
    subset: Annotated[
        float, typer.Option(min=0.0001, max=1, help="Trials see this share of the training part; dev stays whole.")
    ] = 1.0,
    seeds: Annotated[int, typer.Option(min=0, help="Train the best 3 with so many other seeds before naming one.")] = 3,
    storage: Annotated[
        str | None, typer.Option(metavar="URL", help="postgresql+psycopg://..., sqlite:///FILE; else a journal file.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Trials at once: on the CPU, or one on each GPU.")] = 1,
    name: Annotated[
        str | None, typer.Option(help="runs/NAME holds the search; saying it again goes on or joins.")
    ] = None,
    sampler: Annotated[str, typer.Option(help="One of Optuna's; options behind colons.")] = "TPESampler",
    pruner: Annotated[str, typer.Option(help="One of Optuna's; NopPruner for none.")] = "PercentilePruner",
    config: Annotated[
        Path | None, typer.Option("--config", "--config-name", metavar="FILE", help="Space and settings, TOML or YAML.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, mps, cuda, cuda:1 or cpu.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")] = False,
) -> None:
    """Try settings, and name the best with its interval.

    \b
    whet search text lr=1e-5..1e-2:log --trials 12
    whet search text lr=1e-5..1e-2:log arch.layers=[1,2] epochs=3 --subset 0.2 --name reviews
    whet train text --from-search reviews

    Optuna proposes; every trial is a run folder in runs/NAME, trained in a process of its own on the same split. Trials
    that fall behind are ended early. One that runs out of memory is infeasible on this machine, not bad. One that is
    killed goes on from its checkpoint. The best three are trained with other seeds before a winner is named; the test
    part is left to the final training.
    """
    from whet.api.search import prepare_search, run_search
    from whet.cli import console
    from whet.report.search_report import render_search, search_page
    from whet.run import durable

    asked = prepare_search(
        what,
        space or (),
        file=config,
        name=name,
        subset=subset,
        seeds=seeds,
        sampler=sampler,
        pruner=pruner,
        device=device,
    )
    console.note(f"search    {_short(asked.folder)}: {' '.join(asked.question.space.words)}")
    console.note(f"watch     whet watch {shlex.quote(_short(asked.folder))} shows the trials while they train")
    stop = threading.Event()
    with _stopped_by_signals(stop) as signals:
        result = run_search(
            asked, trials=trials, timeout=timeout, storage=storage, jobs=jobs, say=console.note, told=_tell, stop=stop
        )
    page = asked.folder / "report.html"
    durable.write_file(page, data=search_page(result).encode())
    if json:
        console.result_json(result.as_json())
    else:
        console.result(render_search(result))
    ended = sum(trial.state not in ("running", "waiting") for trial in result.trials)
    if ended < asked.most(trials) or (seeds and result.candidates and not result.is_confirmed):
        same = "the same command" if name else f"the same command with --name {shlex.quote(asked.folder.name)}"
        console.note(f"go on     {same} goes on with it")
    elif result.winner is not None:
        words = f"whet train {what} --from-search {shlex.quote(asked.folder.name)}"
        console.note(f"next      {words}   (all of the training part, and the test)")
    console.note(f"report    {_short(page)} shows it in a browser")
    if signals:
        raise typer.Exit(128 + signals[0])


def _tell(ended: "FinishedTrial") -> None:
    from whet.base.units import format_seconds
    from whet.cli import console
    from whet.report.search_report import format_settings

    value = "" if ended.value is None or ended.state == "infeasible" else f"  {ended.value:.4g}"
    words = f"  {ended.words}" if ended.words else ""
    spent = f"{ended.steps:,} steps, {format_seconds(ended.seconds)}"
    settings = format_settings(dict(ended.parameters))
    if ended.part == "seed":
        who, settings = f"seed {ended.parameters['seed']} of trial {ended.parameters['trial']}", ""
    else:
        who, settings = f"trial {ended.number}", f"  {settings}"
    console.note(f"{who:<9} {ended.state:<11}{value}{settings}  ({spent}){words}")


@contextlib.contextmanager
def _stopped_by_signals(stop: threading.Event) -> Iterator[list[int]]:
    """While entered, Ctrl-C and SIGTERM let running trials save and wait in line; the list holds those that came."""
    from whet.cli import console

    heard: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if heard:
            stop_immediately(number)
        heard.append(number)
        stop.set()
        # In the middle of another note Python refuses a second one.
        with contextlib.suppress(RuntimeError):
            console.note(stop_message(number, when="once the running trials are saved"))

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
