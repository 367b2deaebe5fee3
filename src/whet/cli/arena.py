"""whet arena: which of two players is better, and how sure is that?"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import typer

_LONG_SECONDS = 10.0


def arena(
    what: Annotated[str, typer.Argument(metavar="GAME", help="hex.")],
    one: Annotated[str, typer.Argument(metavar="A", help="random, two-distance, a run, or RUN@64 with simulations.")],
    two: Annotated[str, typer.Argument(metavar="B", help="The other player.")],
    games: Annotated[int, typer.Option(min=2, max=1_000_000, help="Games; every opening is played twice.")] = 400,
    size: Annotated[int | None, typer.Option(min=2, max=26, help="Of the board; the runs' own if not given.")] = None,
    openings: Annotated[
        Literal["even", "random"],
        typer.Option(help="even: of random ones, those in which the two-distance player sees no side ahead."),
    ] = "even",
    stones: Annotated[
        int | None, typer.Option(min=0, max=100, help="Of an opening; 2 of random ones, 3 of even ones if not given.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides openings, and which of equal moves is taken.")] = 0,
    checkpoint: Annotated[str, typer.Option(metavar="last|best|STEP", help="Which weights of runs.")] = "last",
    device: Annotated[str, typer.Option(help="auto, mps, cuda, cuda:1 or cpu.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Let two players meet: paired openings, both colours.

    \b
    whet arena hex runs/hex-001 random
    whet arena hex runs/hex-001@64 two-distance --games 400 --openings random

    Every opening is different and is played twice, colours changed. Only those that one player wins with both colours
    tell them apart, so openings are even ones: neither side is ahead. All games go on in step, so that positions
    reach a net in batches. The interval counts what openings are worth, not games alone.
    """
    from whet.base.errors import UsageError
    from whet.cli import console
    from whet.recipes.recipe import load_recipe

    recipe = load_recipe(what)
    if not recipe.supports("hold_contest"):
        raise UsageError(f"{what} is not played", got=what, try_="hex")
    with _watched() as watch:
        found = recipe.hold_contest(
            one,
            two,
            num_games=games,
            size=size,
            openings=openings,
            num_stones=stones,
            seed=seed,
            device=device,
            checkpoint=checkpoint,
            watch=watch,
        )
    if json:
        console.result_json(found.as_json())
    else:
        console.result("\n".join(found.lines))


@contextmanager
def _watched() -> Iterator[Callable[[int, int], None] | None]:
    """Who is told how many games are over."""
    from whet.cli import console

    if console.quiet:
        yield None
        return
    from whet.training.callbacks.progress import ProgressLine

    line = ProgressLine("arena")
    is_redrawn, begun = sys.stderr is not None and sys.stderr.isatty(), time.monotonic()

    def tell(over: int, games: int) -> None:
        # Where a line stays, a short contest is over before it would be of use.
        if is_redrawn or time.monotonic() - begun > _LONG_SECONDS:
            line("measuring", {"words": f"{over:,} of {games:,} games are over"})

    try:
        yield tell
    finally:
        line.close()
