"""whet train: trains a recipe; the same command goes on where it stopped."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from whet.config.resolve import ResolvedConfig
    from whet.recipes.recipe import Recipe
    from whet.training.callbacks.event_log import EventHandler
    from whet.training.callbacks.progress import ProgressLine
    from whet.training.loop import TrainResult


@dataclass(frozen=True, kw_only=True, slots=True)
class _How:
    """What the options say about a training, whatever its words and its folder."""

    config: Path | None
    device: str
    allow: str
    fresh: bool
    measures: bool
    notifies: bool
    max_restarts: int
    nproc: int


def train(
    what: Annotated[
        str, typer.Argument(metavar="RECIPE|FILE", help="text, chat, puzzle, hex, or a Python file with recipe().")
    ],
    words: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Such as epochs=3 lr=1e-4.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "--config-name", metavar="FILE", help="Settings from TOML or YAML.")
    ] = None,
    run: Annotated[
        # Under Python 3.11 torchrun takes --run for its own --run-path, wherever it stands.
        Path | None,
        typer.Option(
            "--run", "--run-dir", metavar="DIR", help="The run folder; the next runs/RECIPE-NNN if not given."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, mps, cuda, cuda:1 or cpu.")] = "auto",
    allow: Annotated[
        str, typer.Option(metavar="data,batch", help="What may be other than it was when the run goes on.")
    ] = "",
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove what is in --run first, and start anew.")] = False,
    no_measure: Annotated[
        bool, typer.Option("--no-measure", help="Plan by rules alone, however long the run is.")
    ] = False,
    nproc: Annotated[
        int, typer.Option(min=1, max=1024, help="Processes on this machine that share each global batch, as torchrun.")
    ] = 1,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often a training that was killed is started again; 0 runs it right here.")
    ] = 3,
    notify: Annotated[
        bool, typer.Option("--notify", help="Tell the desktop when it ends or needs attention, else the terminal.")
    ] = False,
    from_search: Annotated[
        str | None, typer.Option("--from-search", metavar="NAME", help="With the settings that whet search found best.")
    ] = None,
) -> None:
    """Train a recipe; the same command resumes it.

    \b
    whet train text
    whet train text data=reviews.jsonl epochs=3 --run runs/reviews
    whet train text data=reviews.jsonl seeds=3 --run runs/reviews-seeds
    whet train my_recipe.py --device cpu
    whet train text --nproc 2 --device cpu

    A run that is long enough to earn it back is measured first, for a minute at most: which precision, micro-batch,
    threads and so on are fastest here, with evidence in its plan (whet plan RUN --why precision).

    Ctrl-C finishes the step, saves and stops. Say the same command with the same --run, and it goes on. The training
    runs in a process of its own: when that is killed, for lack of memory above all, it is started again and goes on.
    """
    from whet.base.errors import UsageError
    from whet.cli import console
    from whet.cli import nproc as processes
    from whet.cli.multi_run import parse_seeds, train_seeds
    from whet.training import supervisor

    if fresh and run is None:
        raise UsageError("--fresh needs a folder", got="no --run", try_="--run DIR")
    if from_search is not None:
        from whet.api.search import winning_args

        # Your own words come later, and win.
        words = [*winning_args(from_search, recipe=what), *(words or ())]
        console.note(f"search    {from_search}: {' '.join(words)}")
    if supervisor.is_orphan():
        raise typer.Exit(1)

    how = _How(
        config=config,
        device=device,
        allow=allow,
        fresh=fresh,
        measures=not no_measure,
        notifies=notify,
        max_restarts=max_restarts,
        nproc=nproc,
    )
    processes.validate(what, words or [], how.nproc, config=config, device=device)

    def one(words: list[str], run: Path | None) -> int:
        return _train_one(what, words, run, how)

    chosen = parse_seeds(words or (), config)
    if len(chosen) == 1 or supervisor.is_supervised():
        raise typer.Exit(one(words or [], run))

    def command(folder: Path) -> list[str]:
        return ["whet", "train", what, *(words or ()), *_options(config, device), "--run", str(folder)]

    has_file = config is not None
    raise typer.Exit(
        train_seeds(one, what=what, words=words or [], seeds=chosen, run=run, has_file=has_file, command=command)
    )


def _train_one(what: str, words: list[str], run: Path | None, how: _How) -> int:
    """One run, in a process that may be started again, or right here; its exit code."""
    from whet.cli import console, nproc, train_output
    from whet.recipes.recipe import load_recipe
    from whet.run.folder import next_run_path
    from whet.training import supervisor

    def again(path: Path | None) -> list[str]:
        options = [*_options(how.config, how.device), *(["--allow", how.allow] if how.allow else [])]
        options += [*([] if how.measures else ["--no-measure"]), *(["--notify"] if how.notifies else [])]
        folder = path or run
        named = ["--run", str(folder)] if folder else []
        return ["train", what, *words, *options, *named, *console.global_flags()]

    if how.nproc > 1:
        with (
            _set_aside(run) if how.fresh and run else contextlib.nullcontext(),
            train_output.restart_notifier(what, is_wanted=how.notifies) as say,
        ):
            # Named here: who is started again must find it.
            folder = run or next_run_path(Path("runs"), recipe=load_recipe(what).name)
            restarts = how.max_restarts
            return nproc.launch(again, folder, num_processes=how.nproc, max_restarts=restarts, say=say)
    if nproc.is_distributed():
        nproc.check_run_named(run)
        nproc.stop_with_launcher()
        nproc.report_lost_ranks()
        return _train_here(what, words, run, how)
    if how.max_restarts and not supervisor.is_supervised() and not _has_virtual_mac():
        with (
            _set_aside(run) if how.fresh and run else contextlib.nullcontext(),
            train_output.restart_notifier(what, is_wanted=how.notifies) as say,
        ):
            return supervisor.supervise(again, max_restarts=how.max_restarts, say=say)
    supervisor.exit_with_parent()
    return _train_here(what, words, run, how)


def _train_here(what: str, words: list[str], run: Path | None, how: _How) -> int:
    """One run in this process; its exit code."""
    from whet.base.errors import UsageError
    from whet.cli import console, nproc, train_output
    from whet.config.resolve import resolve_config
    from whet.recipes.recipe import BUILT_IN, load_recipe
    from whet.run.durable import check_writable
    from whet.run.folder import RUN_FILE, check_run_path, next_run_path, open_run

    recipe = load_recipe(what)
    resolved = resolve_config(recipe.Config, words, file=how.config, can_measure=True)
    recipe.describe(resolved.config)
    path = nproc.broadcast_path(run or next_run_path(Path("runs"), recipe=recipe.name))
    if not path.exists():
        check_writable(path)
    if getattr(resolved.config, "selfplay", False):
        from whet.cli.multi_run import train_selfplay

        if how.fresh and path.exists():
            raise UsageError("a self-play is not removed", got=f"--fresh --run {path}", try_="another --run DIR")
        said = ["whet", "train", what, *words, *_options(how.config, how.device), "--run", str(path)]
        return train_selfplay(recipe, resolved, path, device=how.device, command=said)
    if not (path / RUN_FILE).exists():
        # Before a minute is spent on measuring.
        check_run_path(path)
    if resolved.is_batch_open:
        resolved = _with_a_batch(what, resolved, path, device=how.device, fresh=how.fresh, measures=how.measures)
    command = [
        "whet",
        "train",
        what,
        *words,
        *_options(how.config, how.device),
        *nproc.nproc_options(),
        "--run",
        str(path),
    ]
    is_done = not how.fresh and _is_done(path, resolved.config.model_dump(mode="json"))
    if nproc.broadcast_flag(is_done):
        console.note(f"{path} is done; epochs or max_steps may grow, --fresh starts anew")
    else:
        result = _train_now(what, recipe, resolved, path, command, how)
        if result.state == "stopped":
            why = "" if result.exit_code else " (epochs_per_session)"
            train_output.print_stopped(path, step=result.step, why=why, command=command)
            return result.exit_code
    if not console.rank:
        can = {name: recipe.name in BUILT_IN and recipe.supports(name) for name in ("hold_contest", "speak")}
        question = recipe.example_input(open_run(path).kept) if recipe.name in BUILT_IN else None
        train_output.print_summary(path, question=question, can_play=can["hold_contest"], can_speak=can["speak"])
    return 0


def _train_now(
    what: str, recipe: "Recipe", resolved: "ResolvedConfig[Any]", path: Path, command: list[str], how: _How
) -> "TrainResult":
    """Trains what is not done yet; torch is loaded here, unless a recipe of yours has done so."""
    from whet.cli import console, nproc
    from whet.device.environment import configure_before_torch
    from whet.training.supervisor import report_to_parent

    configure_before_torch(
        mps_fallback=resolved.config.mps_fallback == "on", deterministic=resolved.config.deterministic == "on"
    )
    from whet.api.autotune import recipe_bench
    from whet.recipes.runner import train_recipe
    from whet.training.callbacks.notifications import DesktopNotifier
    from whet.training.callbacks.progress import ProgressLine

    line = ProgressLine(recipe.name, epochs=resolved.config.epochs)
    show = _show_in(line, path)
    measures = how.measures and not nproc.is_distributed()
    if how.measures and not measures and not path.exists():
        console.note("not measured: the steps of several processes are planned by rules")
    if measures and not path.exists():
        report_to_parent(None)
    with nproc.on_rank_zero(_set_aside(path)) if how.fresh else contextlib.nullcontext():
        return train_recipe(
            recipe,
            resolved,
            run=path,
            device=how.device,
            command=command,
            show=DesktopNotifier(recipe.name, show=show, say=line.say) if how.notifies else show,
            allow=tuple(word.strip() for word in how.allow.split(",") if word.strip()),
            open_bench=partial(recipe_bench, what, resolved, device=how.device) if measures else None,
        )


def _show_in(line: "ProgressLine", path: Path) -> "EventHandler":
    """What happens in a run, for the screen and for the process that watches over this one."""
    from whet.cli import console
    from whet.plan.plan import read_plan
    from whet.plan.render import plan_lines
    from whet.run.folder import open_run
    from whet.training.supervisor import report_to_parent

    def show(kind: str, fields: dict[str, Any]) -> None:
        if kind in ("start", "resume", "step"):
            report_to_parent(path, step=fields["step"])
        if console.quiet or console.rank:
            return
        if kind == "data":
            line.say("\n".join(f"data      {note}" for note in fields["notes"]))
        if kind in ("start", "resume") and "rollback_reason" not in fields:
            plan = read_plan(open_run(path).plan, where=f"{path}/plan.json")
            line.say("\n".join((f"run       {path}", *plan_lines(plan, width=console.width()), "")))
        line(kind, fields)

    return show


def _with_a_batch(
    what: str, resolved: "ResolvedConfig[Any]", path: Path, *, device: str, fresh: bool, measures: bool
) -> "ResolvedConfig[Any]":
    """With the global batch of the run that is there, or with one that is measured now."""
    from whet.api.autotune import BATCH_SIZE_BUDGET_SECONDS, resolve_auto_batch_size, restore_auto_batch
    from whet.cli import console
    from whet.config.resolve import auto_batch_error
    from whet.training.supervisor import report_to_parent

    kept = None if fresh else restore_auto_batch(path, resolved)
    if kept is not None:
        return kept
    if not measures:
        raise auto_batch_error("--no-measure")
    report_to_parent(None)
    console.note(f"measuring which global batch uses this machine well, {BATCH_SIZE_BUDGET_SECONDS:.0f} s at most ...")
    with console.measuring_progress(what) as watch:
        found = resolve_auto_batch_size(what, resolved, device=device, watch=watch)
    for line in found.batch.lines if found.batch else ():
        console.note(line)
    return found


def _has_virtual_mac() -> bool:
    """A simulated machine lives in this process alone; one is there only if its module was loaded."""
    installing = sys.modules.get("whet.device.virtual_mac.install")
    return installing is not None and installing.installed() is not None


def _options(config: Path | None, device: str) -> list[str]:
    options = ["--config", str(config)] if config else []
    return [*options, "--device", device] if device != "auto" else options


def _is_done(path: Path, config: dict[str, Any]) -> bool:
    """Whether the run ended and is asked for nothing else."""
    from whet.report.run_status import read_status
    from whet.run.folder import RUN_FILE, open_run

    return (path / RUN_FILE).exists() and open_run(path).config == config and read_status(path).state == "done"


@contextlib.contextmanager
def _set_aside(path: Path) -> Iterator[None]:
    """Moves an old run out of the way: it comes back if no new one appears in its place, else it goes for good."""
    from whet.base.errors import UsageError
    from whet.run import durable, lock
    from whet.run.folder import open_run
    from whet.run.prune import foreign_files

    path = path.resolve()
    if not path.exists():
        yield
        return
    open_run(path)
    foreign = foreign_files(path)
    if foreign:
        raise UsageError(
            "--fresh would remove files that are not whet's",
            got=", ".join(foreign)[:200],
            try_="move them, or another --run",
        )
    aside = durable.leftover_name(path)
    with lock.acquire(path):
        path.rename(aside)
    try:
        yield
    finally:
        if path.exists():
            durable.remove(aside)
        else:
            aside.rename(path)
