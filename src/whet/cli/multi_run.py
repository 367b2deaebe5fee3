"""Training that consists of several runs: `seeds=N` and self-play."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from whet.base.errors import UsageError
from whet.cli import output

_SEED_KEYS = ("seeds", "seed")
# Trains one run with these settings in a folder, and returns the exit code.
TrainRun = Callable[[list[str], Path], int]


def parse_seeds(settings: Sequence[str], file: Path | None) -> range:
    """Return the seeds that the settings and the config file request. Training itself reports invalid values."""
    from whet.config.options import MAX_SEEDS
    from whet.config.sources import parse_args, read_config_file

    read = parse_args(settings)
    # A built-in configuration is not a file, and has no seeds.
    values = {**(read_config_file(file) if file and file.is_file() else {}), **read.values}
    number, first = (
        _as_int(values.get(key)) if key in read.values or key not in read.dropped else None for key in _SEED_KEYS
    )
    first, number = first or 0, number or 1
    is_valid = first >= 0 and 1 <= number <= MAX_SEEDS
    return range(first, first + (number if is_valid else 1))


def _as_int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def train_seeds(
    train_run: TrainRun,
    *,
    target: str,
    settings: list[str],
    seeds: range,
    run: Path | None,
    has_file: bool,
    command: Callable[[Path], list[str]],
) -> int:
    """Train or resume one run per seed in a folder, and print the mean and spread of the results.

    Return the exit code.
    """
    from whet.recipes.recipe import BUILT_IN
    from whet.report.seeds import (
        SEEDS_FILE,
        check_same_data,
        gather_seeds,
        render_seeds,
        seed_folder,
        write_seeds,
    )
    from whet.run import durable
    from whet.run.folder import RUN_FILE, next_run_path, shell_path

    name = target if target in BUILT_IN else Path(target.partition(":")[0]).stem
    folder = run or next_run_path(Path("runs"), recipe=name)
    if (folder / RUN_FILE).exists():
        raise UsageError(f"{folder} is a single run", got=f"seeds={len(seeds)}", try_="another --run, or no seeds")
    durable.check_writable(folder.absolute())
    others = [word for word in settings if word.lstrip("+~").partition("=")[0] not in _SEED_KEYS]
    # Override a `seeds` key in the config file.
    others += ["seeds=1"] if has_file else []
    for number, seed in enumerate(seeds, start=1):
        path = seed_folder(folder, seed)
        output.note(f"seed {seed}: run {number} of {len(seeds)}, in {path}")
        code = train_run([*others, *_batch_of_first_seed(settings, folder, seeds), f"seed={seed}"], path)
        results = gather_seeds(folder, seeds, recipe=name)
        check_same_data(folder, results.done)
        if folder.exists():
            write_seeds(folder, results)
        if code or seed not in results.done:
            # Stop after a usage error, because the runs with other seeds would fail in the same way.
            if path.exists() and code != UsageError.exit_code:
                done = f"{len(results.done)} of {len(seeds)} seeds are done"
                output.note(f"{done}; to resume all:\n  {shlex.join(command(folder))}")
            return code
    output.result("\n".join(("", *render_seeds(results))))
    shown = f"whet report {shell_path(folder)}"
    output.note(f"\nsaved in  {folder / SEEDS_FILE}\nnext      {shown}  print this table again")
    return 0


def _batch_of_first_seed(settings: Sequence[str], folder: Path, seeds: range) -> list[str]:
    """Return the batch size and learning rate that global_batch_size=auto found for the first seed, as settings.

    The batch size is measured only once, so that all seeds use the same. Empty if it is fixed or not yet measured.
    """
    from whet.config.sources import parse_args
    from whet.report.seeds import seed_folder
    from whet.run.folder import RUN_FILE, open_run

    values = parse_args(settings).values
    first = seed_folder(folder, seeds[0])
    if "auto" not in (values.get("global_batch_size"), values.get("batch_size")) or not (first / RUN_FILE).exists():
        return []
    config = open_run(first).config
    return [f"global_batch_size={config['global_batch_size']}", f"lr={config['lr']}"]


def train_selfplay(recipe: Any, resolved: Any, path: Path, *, device: str, command: Sequence[str]) -> int:
    """Alternate self-play and training in a folder, or resume. Return the exit code."""
    from whet.base.process import TerminatedError
    from whet.device.environment import configure_before_torch

    if not recipe.supports("train_by_self_play"):
        raise UsageError(f"{recipe.name} has no self-play", got="selfplay=True", try_="whet train hex selfplay=True")
    if resolved.is_batch_open:
        raise UsageError(
            "self-play needs a fixed global batch size", got="global_batch_size=auto", try_="global_batch_size=256"
        )
    config = resolved.config
    configure_before_torch(mps_fallback=config.mps_fallback == "on", deterministic=config.deterministic == "on")
    from whet.training.callbacks.progress_line import ProgressLine
    from whet.training.supervisor import report_to_parent

    # From here on, the supervisor restarts this process if it is killed.
    report_to_parent(path)
    line = ProgressLine(recipe.name)
    shown_events = {"start", "step", "warning", "oom", "skip", "stopping"}

    def on_event(kind: str, fields: dict[str, Any]) -> None:
        nonlocal line
        if kind in ("start", "resume"):
            # Each generation is a training run with its own progress.
            line.close()
            line = ProgressLine(recipe.name)
        if not output.quiet and kind in shown_events:
            line(kind, fields)

    def log(text: str) -> None:
        if not output.quiet:
            line.print_line(f"{recipe.name}: {text}")

    try:
        code: int = recipe.train_by_self_play(
            resolved, folder=path, device=device, command=command, message=log, on_event=on_event
        )
    except KeyboardInterrupt:
        # Interrupted during play. Unfinished games will be played again.
        code = 130
    except TerminatedError as error:
        code = error.exit_code
    finally:
        line.close()
    if code:
        output.note(f"stopped; to resume:\n  {shlex.join(command)}")
        return code
    from whet.run.folder import shell_path

    output.note(f"\nsaved in  {path}\nnext      whet arena hex {shell_path(path)}@64 two-distance")
    return 0
