"""whet data hex: recorded games, looked at and made into positions to train on."""

from pathlib import Path
from typing import Annotated

import typer


def data_hex(
    path: Annotated[Path, typer.Argument(metavar="FILE|DIR", help="Games: .trmph, HexWorld or plain lists of moves.")],
    output_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder to make; without it the games are only looked at.")
    ] = None,
    size: Annotated[int | None, typer.Option(metavar="N", help="The board; found out where it is not said.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Decides which games go where.")] = 0,
    dev_share: Annotated[float, typer.Option(metavar="SHARE", help="Of the games, to judge a training by.")] = 0.05,
    test_share: Annotated[float, typer.Option(metavar="SHARE", help="Of the games, for the end.")] = 0.05,
    max_bad: Annotated[
        int | None, typer.Option(metavar="N", help="Bad games that are left out; more are an error. A tenth of them.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The manifest as JSON.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if a game was left out as bad.")] = False,
) -> None:
    """Make recorded games of Hex ready to train on.

    \b
    whet data hex games.trmph
    whet data hex games.trmph --output-dir data/hex
    whet train hex data=data/hex

    Finds out which edges the first player joins, replays every game, and writes all positions with the move that was
    played and who won, split by game. The folder appears when it is complete, or not at all.
    """
    from whet.cli import console
    from whet.hex.positions.importing import ImportWishes, import_records, told

    asked = {"size": size, "seed": seed, "dev_share": dev_share, "test_share": test_share, "max_bad": max_bad}
    overrides = ImportWishes.from_json(asked, where="the command line")
    manifest = import_records(path, into=output_dir, overrides=overrides, progress=_Progress())
    if json:
        console.result_json(manifest.as_json())
    else:
        console.result("\n".join(told(manifest)))
        if output_dir is not None:
            console.note(f"written to {output_dir}; whet train hex data={output_dir} learns from it")
    if strict and manifest.left_out:
        raise typer.Exit(1)


class _Progress:
    """A line now and then while a long file is read."""

    def __init__(self) -> None:
        import time

        self._clock = time.monotonic
        self._next = self._clock() + 5

    def __call__(self, num_games: int) -> None:
        from whet.cli import console

        if self._clock() >= self._next:
            console.note(f"{num_games:,} games read")
            self._next = self._clock() + 5
