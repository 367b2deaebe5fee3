"""Trainings that consist of several runs: `seeds=N` and self-play."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_KEYS = ("seeds", "seed")
TrainOne = Callable[[list[str], Path], int]
"""Trains with these words in this folder; an exit code."""


def parse_seeds(words: Sequence[str], file: Path | None) -> range:
    """The seeds that words and a config file ask for; what is wrong with them is left to the training to say."""
    from whet.config.options import MAX_SEEDS
    from whet.config.sources import parse_args, read_config_file

    read = parse_args(words)
    told = {**(read_config_file(file) if file else {}), **read.values}
    number, first = (_whole(told.get(key)) if key in read.values or key not in read.dropped else None for key in _KEYS)
    first, number = first or 0, number or 1
    is_meant = first >= 0 and 1 <= number <= MAX_SEEDS
    return range(first, first + (number if is_meant else 1))


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def train_seeds(
    train_one: TrainOne,
    *,
    what: str,
    words: list[str],
    seeds: range,
    run: Path | None,
    has_file: bool,
    command: Callable[[Path], list[str]],
) -> int:
    """Trains with each seed, goes on with the one that was stopped, and tells the spread when all are done."""
    from whet.base.errors import UsageError
    from whet.cli import console
    from whet.recipes.recipe import BUILT_IN
    from whet.report.seeds import SEEDS_FILE, check_same_data, gather_seeds, render_seeds, seed_folder, write_seeds
    from whet.run import durable
    from whet.run.folder import RUN_FILE, next_run_path

    name = what if what in BUILT_IN else Path(what.partition(":")[0]).stem
    folder = run or next_run_path(Path("runs"), recipe=name)
    if (folder / RUN_FILE).exists():
        raise UsageError(f"{folder} is a single run", got=f"seeds={len(seeds)}", try_="another --run, or no seeds")
    durable.check_writable(folder.absolute())
    others = [word for word in words if word.lstrip("+~").partition("=")[0] not in _KEYS]
    # Words win over a config file.
    others += ["seeds=1"] if has_file else []
    for number, seed in enumerate(seeds, start=1):
        path = seed_folder(folder, seed)
        console.note(f"seed {seed}: run {number} of {len(seeds)}, in {path}")
        code = train_one([*others, *_batch_of_first(words, folder, seeds), f"seed={seed}"], path)
        found = gather_seeds(folder, seeds, recipe=name)
        check_same_data(folder, found.done)
        if folder.exists():
            write_seeds(folder, found)
        if code or seed not in found.done:
            # What was refused is not to be said again.
            if path.exists() and code != UsageError.exit_code:
                done = f"{len(found.done)} of {len(seeds)} seeds are done"
                console.note(f"{done}; to go on with all:\n  {shlex.join(command(folder))}")
            return code
    console.result("\n".join(("", *render_seeds(found))))
    shown = f"whet report {shlex.quote(str(folder))}"
    console.note(f"\nkept      {folder / SEEDS_FILE}\nnext      {shown}  this table again")
    return 0


def _batch_of_first(words: Sequence[str], folder: Path, seeds: range) -> list[str]:
    """A global batch that was left open is measured once: the other seeds take what the first one found."""
    from whet.config.sources import parse_args
    from whet.report.seeds import seed_folder
    from whet.run.folder import RUN_FILE, open_run

    values = parse_args(words).values
    first = seed_folder(folder, seeds[0])
    if "auto" not in (values.get("global_batch_size"), values.get("batch_size")) or not (first / RUN_FILE).exists():
        return []
    config = open_run(first).config
    return [f"global_batch_size={config['global_batch_size']}", f"lr={config['lr']}"]


def train_selfplay(recipe: Any, resolved: Any, path: Path, *, device: str, command: Sequence[str]) -> int:
    """Plays, learns and judges in a folder, or goes on there; the exit code."""
    from whet.base.errors import UsageError
    from whet.base.process import TerminatedError
    from whet.cli import console
    from whet.device.environment import configure_before_torch

    if not recipe.supports("improve"):
        raise UsageError(f"{recipe.name} is not played", got="selfplay=True", try_="whet train hex selfplay=True")
    if resolved.is_batch_open:
        raise UsageError("a self-play needs a number", got="global_batch_size=auto", try_="global_batch_size=256")
    config = resolved.config
    configure_before_torch(mps_fallback=config.mps_fallback == "on", deterministic=config.deterministic == "on")
    from whet.training.callbacks.progress import ProgressLine
    from whet.training.supervisor import report_to_parent

    # Killed from here on, it is started again.
    report_to_parent(path)
    line = ProgressLine(recipe.name)
    told = {"start", "step", "warning", "oom", "skip", "stopping"}

    def show(kind: str, fields: dict[str, Any]) -> None:
        nonlocal line
        if kind in ("start", "resume"):
            # Another training, whose speed and end are its own.
            line.close()
            line = ProgressLine(recipe.name)
        if not console.quiet and kind in told:
            line(kind, fields)

    def say(text: str) -> None:
        if not console.quiet:
            line.say(f"{recipe.name}: {text}")

    try:
        code: int = recipe.improve(resolved, folder=path, device=device, command=command, say=say, show=show)
    except KeyboardInterrupt:
        # While it played: what was under way is played again.
        code = 130
    except TerminatedError as error:
        code = error.exit_code
    finally:
        line.close()
    if code:
        console.note(f"stopped; to go on:\n  {shlex.join(command)}")
        return code
    console.note(f"\nkept      {path}\nnext      whet arena hex {shlex.quote(str(path))}@64 two-distance")
    return 0
