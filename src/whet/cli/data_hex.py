"""whet data hex: recorded games, looked at and made into positions to train on."""

from collections.abc import Sequence
from pathlib import Path


def look_at_games(path: Path, words: Sequence[str], *, into: Path | None, as_json: bool, fix: Path | None) -> bool:
    """Tells what a file of games holds, and writes its positions; whether games were left out as bad."""
    from whet.base.errors import UsageError
    from whet.cli import screen
    from whet.config.words import read_words
    from whet.hex.positions.importing import ImportWishes, import_records, told

    if fix is not None:
        raise UsageError("games are not mended", got=f"--fix {fix}", try_="--output-dir DIR leaves the bad ones out")
    wishes = ImportWishes.from_json(read_words(words).values, where="the command line")
    manifest = import_records(path, into=into, wishes=wishes, progress=_Progress())
    if as_json:
        screen.result_json(manifest.as_json())
    else:
        screen.result("\n".join(told(manifest)))
        if into is not None:
            screen.note(f"written to {into}; train on it with data={into}")
    return bool(manifest.left_out)


class _Progress:
    """A line now and then while a long file is read."""

    def __init__(self) -> None:
        import time

        self._clock = time.monotonic
        self._next = self._clock() + 5

    def __call__(self, num_games: int) -> None:
        from whet.cli import screen

        if self._clock() >= self._next:
            screen.note(f"{num_games:,} games read")
            self._next = self._clock() + 5
