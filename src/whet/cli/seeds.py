"""seeds=3: the same training with several seeds, one after another in one folder, and what they say together."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_KEYS = ("seeds", "seed")
TrainOne = Callable[[list[str], Path], int]
"""Trains with these words in this folder; an exit code."""


def wanted_seeds(words: Sequence[str], file: Path | None) -> range:
    """The seeds that words and a config file ask for; what is wrong with them is left to the training to say."""
    from whet.config.files import read_config_file
    from whet.config.keys import MOST_SEEDS
    from whet.config.words import read_words

    read = read_words(words)
    told = {**(read_config_file(file) if file else {}), **read.values}
    number, first = (_whole(told.get(key)) if key in read.values or key not in read.dropped else None for key in _KEYS)
    first, number = first or 0, number or 1
    is_meant = first >= 0 and 1 <= number <= MOST_SEEDS
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
    from whet.cli import screen
    from whet.recipes.recipe import BUILT_IN
    from whet.report.seeds import (
        SEEDS_FILE,
        folder_of_seed,
        gather_seeds,
        refuse_other_data,
        seeds_lines,
        write_seeds,
    )
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
        path = folder_of_seed(folder, seed)
        screen.note(f"seed {seed}: run {number} of {len(seeds)}, in {path}")
        code = train_one([*others, *_batch_of_first(words, folder, seeds), f"seed={seed}"], path)
        found = gather_seeds(folder, seeds, recipe=name)
        refuse_other_data(folder, found.done)
        if folder.exists():
            write_seeds(folder, found)
        if code or seed not in found.done:
            # What was refused is not to be said again.
            if path.exists() and code != UsageError.exit_code:
                done = f"{len(found.done)} of {len(seeds)} seeds are done"
                screen.note(f"{done}; to go on with all:\n  {shlex.join(command(folder))}")
            return code
    screen.result("\n".join(("", *seeds_lines(found))))
    shown = f"whet report {shlex.quote(str(folder))}"
    screen.note(f"\nkept      {folder / SEEDS_FILE}\nnext      {shown}  this table again")
    return 0


def _batch_of_first(words: Sequence[str], folder: Path, seeds: range) -> list[str]:
    """A global batch that was left open is measured once: the other seeds take what the first one found."""
    from whet.config.words import read_words
    from whet.report.seeds import folder_of_seed
    from whet.run.folder import RUN_FILE, open_run

    values = read_words(words).values
    first = folder_of_seed(folder, seeds[0])
    if "auto" not in (values.get("global_batch_size"), values.get("batch_size")) or not (first / RUN_FILE).exists():
        return []
    config = open_run(first).config
    return [f"global_batch_size={config['global_batch_size']}", f"lr={config['lr']}"]
