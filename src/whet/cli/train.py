"""`whet train`: train a recipe, or resume it with the same command."""

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whet.base.errors import UsageError
from whet.base.units import format_seconds
from whet.cli import output
from whet.cli.options import ConfigFile, Device, Settings

if TYPE_CHECKING:
    from whet.config.resolve import ResolvedConfig
    from whet.recipes.recipe import Recipe
    from whet.report.run_report import RunReport
    from whet.training.callbacks.event_log import EventHandler
    from whet.training.callbacks.progress_line import ProgressLine
    from whet.training.loop import TrainResult


@dataclass(frozen=True, kw_only=True, slots=True)
class _TrainOptions:
    """Options of `whet train` that apply to every run that it creates."""

    target: str
    config: Path | None
    device: str
    allow: str
    fresh: bool
    measure: bool
    max_restarts: int
    nproc: int

    def command(self, settings: list[str], run: Path, *extra: str) -> list[str]:
        """Return the `whet train` command that resumes a run."""
        return ["whet", "train", self.target, *settings, *self._common(), *extra, "--run", str(run)]

    def child_command(self, settings: list[str], run: Path | None) -> list[str]:
        """Return the arguments of whet in a child process that trains the run."""
        options = [*self._common(), *(["--allow", self.allow] if self.allow else [])]
        options += [] if self.measure else ["--no-measure"]
        return [
            "train",
            self.target,
            *settings,
            *options,
            *(["--run", str(run)] if run else []),
            *output.global_flags(),
        ]

    def _common(self) -> list[str]:
        config = ["--config", str(self.config)] if self.config else []
        return [*config, *(["--device", self.device] if self.device != "auto" else [])]


def train(
    target: Annotated[
        str, typer.Argument(metavar="RECIPE|FILE", help="text, chat, puzzle, hex, or a Python file with recipe().")
    ],
    settings: Settings = None,
    config: ConfigFile = None,
    run: Annotated[
        # --run-dir exists because torchrun under Python 3.11 reads --run as an abbreviation of its --run-path.
        Path | None,
        typer.Option("--run", "--run-dir", metavar="DIR", help="The run folder. Default: the next runs/RECIPE-NNN."),
    ] = None,
    device: Device = "auto",
    allow: Annotated[
        str, typer.Option(metavar="data,batch,lr", help="What may differ from the original run when resuming.")
    ] = "",
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the run in --run first and start over.")] = False,
    no_measure: Annotated[
        bool, typer.Option("--no-measure", help="Plan by rules only, without timing real steps first.")
    ] = False,
    nproc: Annotated[
        int, typer.Option(min=1, max=1024, help="Processes on this machine; they share each global batch.")
    ] = 1,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Restarts after the training process was killed; 0 trains in this process.")
    ] = 3,
    from_search: Annotated[
        str | None, typer.Option("--from-search", metavar="NAME", help="Use the best settings of a whet search.")
    ] = None,
) -> None:
    """Train a recipe, or resume it with the same command.

    \b
    whet train text
    whet train text data=reviews.jsonl epochs=3 --run runs/reviews
    whet train text data=reviews.jsonl seeds=3 --run runs/reviews-seeds
    whet train my_recipe.py --device cpu
    whet train text --nproc 2 --device cpu

    Before a long run, real steps are timed for at most a minute to find the fastest precision, micro-batch, number of
    threads and other settings on this machine. The plan contains the measurements (whet plan RUN --why precision).

    Ctrl-C finishes the step, saves and stops. Run the same command with the same --run to resume. Training runs in a
    separate process. If that is killed, usually for lack of memory, it is restarted and resumes automatically.
    """
    from whet.cli import ranks
    from whet.cli.multi_run import parse_seeds, train_seeds
    from whet.run.folder import check_run_name
    from whet.training import supervisor

    if run is not None:
        check_run_name(run)
    if fresh and run is None:
        raise UsageError("--fresh needs a run folder", got="no --run", try_="--run DIR")
    settings = settings or []
    if from_search is not None:
        from whet.api.search import winning_args

        # Settings on the command line come later and take precedence.
        settings = [*winning_args(from_search, recipe=target), *settings]
        output.note(f"search    {from_search}: {' '.join(settings)}")
    if supervisor.is_orphan():
        raise typer.Exit(1)
    options = _TrainOptions(
        target=target,
        config=config,
        device=device,
        allow=allow,
        fresh=fresh,
        measure=not no_measure,
        max_restarts=max_restarts,
        nproc=nproc,
    )
    # Fail fast: if the command cannot work, do not start processes or import torch.
    ranks.validate(target, settings, nproc, config=config, device=device)
    seeds = parse_seeds(settings, config)
    if len(seeds) == 1 or supervisor.is_supervised():
        raise typer.Exit(_train_run(settings, run, options))
    raise typer.Exit(
        train_seeds(
            partial(_train_run, options=options),
            target=target,
            settings=settings,
            seeds=seeds,
            run=run,
            has_file=config is not None,
            command=partial(options.command, settings),
        )
    )


def _train_run(settings: list[str], run: Path | None, options: _TrainOptions) -> int:
    """Train one run, in child processes that may be restarted or in this process. Return the exit code."""
    from whet.cli import ranks
    from whet.recipes.recipe import load_recipe
    from whet.run.folder import next_run_path
    from whet.training import supervisor

    def child_command(path: Path | None) -> list[str]:
        return options.child_command(settings, path or run)

    # A training process is already supervised. A simulated Mac exists only in this process, which cannot be restarted.
    is_parent = not supervisor.is_supervised() and not ranks.has_virtual_mac()
    if options.nproc > 1 or (options.max_restarts and is_parent and not ranks.is_distributed()):
        with _set_aside(run) if options.fresh and run else contextlib.nullcontext():
            if options.nproc == 1:
                return supervisor.supervise(child_command, max_restarts=options.max_restarts, notify=output.note)
            # Choose the folder here, so that restarted processes find it.
            folder = run or next_run_path(Path("runs"), recipe=load_recipe(options.target).name)
            return ranks.launch(
                child_command,
                folder,
                num_processes=options.nproc,
                max_restarts=options.max_restarts,
                notify=output.note,
            )
    # From here on, this process trains: as one of several ranks, as a supervised child, or alone.
    if ranks.is_distributed():
        ranks.check_run_named(run)
        ranks.stop_with_launcher()
        ranks.report_lost_ranks()
    else:
        supervisor.exit_with_parent()
    return _train_in_process(settings, run, options)


def _train_in_process(settings: list[str], run: Path | None, options: _TrainOptions) -> int:
    from whet.cli import ranks
    from whet.config.resolve import resolve_config
    from whet.recipes.recipe import load_recipe
    from whet.run.durable import check_writable
    from whet.run.folder import RUN_FILE, check_run_path, next_run_path

    recipe = load_recipe(options.target)
    resolved = resolve_config(recipe.Config, settings, file=options.config, can_measure=True)
    recipe.describe(resolved.config)
    recipe.check_installed(resolved.config)
    # Ranks could find different free folders, so rank 0 decides.
    path = ranks.broadcast_path(run or next_run_path(Path("runs"), recipe=recipe.name))
    if not path.exists():
        check_writable(path)
    if getattr(resolved.config, "selfplay", False):
        from whet.cli.multi_run import train_selfplay

        if options.fresh and path.exists():
            raise UsageError("--fresh cannot delete a self-play run", got=f"--run {path}", try_="another --run DIR")
        command = options.command(settings, path)
        return train_selfplay(recipe, resolved, path, device=options.device, command=command)
    if not (path / RUN_FILE).exists():
        # Check this before a minute is spent on measuring.
        check_run_path(path)
    if resolved.is_batch_open:
        resolved = _resolve_batch(resolved, path, options)
    command = options.command(settings, path, *ranks.nproc_options())
    is_done = not options.fresh and _is_done(path, resolved.config.model_dump(mode="json"))
    if ranks.broadcast_flag(is_done):
        output.note(f"{path} is done; increase epochs or max_steps to train longer, or start over with --fresh")
    else:
        result = _run_training(recipe, resolved, path, command, options)
        if result.state == "stopped":
            _print_stopped(path, step=result.step, why=result.reason, command=command)
            return result.exit_code
    if not output.rank:
        _print_summary(path, recipe)
    return 0


def _run_training(
    recipe: "Recipe", resolved: "ResolvedConfig[Any]", path: Path, command: list[str], options: _TrainOptions
) -> "TrainResult":
    from whet.cli import ranks
    from whet.device.environment import configure_before_torch
    from whet.training.supervisor import report_to_parent

    config = resolved.config
    configure_before_torch(mps_fallback=config.mps_fallback == "on", deterministic=config.deterministic == "on")
    # torch is imported from here on, unless a user's recipe has already imported it.
    from whet.api.autotune import recipe_bench
    from whet.recipes.runner import train_recipe
    from whet.training.callbacks.progress_line import ProgressLine

    line = ProgressLine(recipe.name, epochs=config.epochs)
    on_event = _event_printer(line, path)
    measure = options.measure and not ranks.is_distributed()
    if options.measure and not measure and not path.exists():
        output.note("not measured: steps of several processes are planned by rules")
    if measure and not path.exists():
        report_to_parent(None)
    with ranks.on_rank_zero(_set_aside(path)) if options.fresh else contextlib.nullcontext():
        return train_recipe(
            recipe,
            resolved,
            run=path,
            device=options.device,
            command=command,
            on_event=on_event,
            allow=tuple(word.strip() for word in options.allow.split(",") if word.strip()),
            open_bench=partial(recipe_bench, options.target, resolved, device=options.device) if measure else None,
        )


def _resolve_batch(resolved: "ResolvedConfig[Any]", path: Path, options: _TrainOptions) -> "ResolvedConfig[Any]":
    """Replace global_batch_size=auto with the batch size of the existing run, or with a measured one."""
    from whet.api.autotune import BATCH_SIZE_BUDGET_SECONDS, resolve_auto_batch_size, restore_auto_batch
    from whet.config.resolve import auto_batch_error
    from whet.training.supervisor import report_to_parent

    existing = None if options.fresh else restore_auto_batch(path, resolved)
    if existing is not None:
        return existing
    if not options.measure:
        raise auto_batch_error("--no-measure")
    report_to_parent(None)
    output.note(f"finding a global batch size for this machine, at most {BATCH_SIZE_BUDGET_SECONDS:.0f} s ...")
    with output.measuring_progress(options.target) as watch:
        measured = resolve_auto_batch_size(options.target, resolved, device=options.device, on_progress=watch)
    for line in measured.batch.lines if measured.batch else ():
        output.note(line)
    return measured


def _is_done(path: Path, config: dict[str, Any]) -> bool:
    """Return whether the run is complete and its config is unchanged."""
    from whet.report.run_status import read_status
    from whet.run.folder import RUN_FILE, open_run

    return (path / RUN_FILE).exists() and open_run(path).config == config and read_status(path).state == "done"


@contextlib.contextmanager
def _set_aside(path: Path) -> Iterator[None]:
    """Move an old run away. On exit, delete it if a new run exists in its place, otherwise move it back."""
    from whet.run import durable, lock
    from whet.run.folder import foreign_files, open_run

    path = path.resolve()
    if not path.exists():
        yield
        return
    open_run(path)
    foreign = foreign_files(path)
    if foreign:
        raise UsageError(
            "--fresh would delete files that whet did not write",
            got=", ".join(foreign)[:200],
            try_="move them, or another --run",
        )
    with lock.acquire(path):
        aside = durable.move_aside(path)
    try:
        yield
    finally:
        if path.exists():
            durable.remove(aside)
        else:
            durable.move(aside, path)


def _event_printer(line: "ProgressLine", path: Path) -> "EventHandler":
    """Return a function that prints the events of a run, and reports its step to the supervising process."""
    from whet.training.supervisor import report_to_parent

    def show(kind: str, fields: dict[str, Any]) -> None:
        if kind in ("start", "resume", "step"):
            report_to_parent(path, step=fields["step"])
        if output.quiet or output.rank:
            return
        if kind == "end":
            # The command prints its own summary, which contains the reason why the run ended.
            line.close()
        else:
            line(kind, fields)

    return show


def _print_stopped(path: Path, *, step: int, why: str, command: list[str]) -> None:
    """Print the progress of a stopped run, and the command that resumes it."""
    from whet.report.run_report import summarize

    progress = _progress(summarize(path))
    output.note(f"{why}; saved at step {step:,} in {path}{progress}; to resume:\n  {shlex.join(command)}")


def _progress(report: "RunReport") -> str:
    parts = [f"{format_seconds(report.training_seconds)} of training"]
    if report.loss is not None:
        parts.append(f"loss {report.loss:.4g}")
    if report.goal is not None and report.best_goal is not None:
        parts.append(f"best {report.goal} {report.best_goal:.4g} at step {report.best_goal_step:,}")
    return f" ({', '.join(parts)})"


def _print_summary(path: Path, recipe: "Recipe") -> None:
    """Print how a run ended, its results, and commands that use it."""
    from whet.report.run_report import summarize
    from whet.report.text import render_summary

    output.result(render_summary(summarize(path), width=output.width()))
    output.note("\n".join(("", *_next_commands(path, recipe))))


def _next_commands(path: Path, recipe: "Recipe") -> list[str]:
    from whet.run.folder import shell_path

    run = shell_path(path)
    commands = [(f"whet report {run}", "curves, time, settings; --html for a page to keep or share")]
    commands += _use_commands(path, run, recipe)
    commands.append((f"whet watch {shell_path(path.parent)}", "this run and others in the same folder, in the browser"))
    width = max(len(command) for command, _ in commands)
    labels = ("next", *[""] * (len(commands) - 1))
    return [f"{label:<10}{command:<{width}}  {text}" for label, (command, text) in zip(labels, commands, strict=True)]


def _use_commands(path: Path, run: str, recipe: "Recipe") -> Iterator[tuple[str, str]]:
    """Yield commands that use the model, with descriptions. Yield none for recipes that are not built in."""
    from whet.recipes.recipe import BUILT_IN
    from whet.run.folder import open_run

    if recipe.name not in BUILT_IN:
        return
    question = recipe.example_input(open_run(path).metadata)
    if question:
        yield f'whet predict {run} "{question}"', "use the model"
    if recipe.supports("play_match"):
        yield f"whet play {run}", "play against it in the browser"
    if recipe.supports("load_generator"):
        yield f"whet chat {run}", "chat with it; whet serve offers it to other programs"
