"""`whet play` and `whet arena`: play Hex against a model, and let two players compete."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from whet.base.errors import UsageError
from whet.cli import output
from whet.cli.options import Device, Json, JsonLine, NoBrowser, Port

if TYPE_CHECKING:
    from whet.recipes.hex.game.players import Player

_SHORT_SECONDS = 10.0


def play(
    player_name: Annotated[
        str, typer.Argument(metavar="PLAYER", help="two-distance, random, a run of hex, or RUN@64 with simulations.")
    ],
    size: Annotated[
        int | None, typer.Option(metavar="N", help="Board size. Default: 7, or the size that the run was trained on.")
    ] = None,
    color: Annotated[str, typer.Option(metavar="COLOR", help="Your color: blue (moves first) or red.")] = "blue",
    device: Device = "auto",
    port: Port = 8322,
    no_browser: NoBrowser = False,
    json: JsonLine = False,
) -> None:
    """Play Hex in the browser.

    \b
    whet play two-distance
    whet play two-distance --size 7 --color red
    whet play runs/hex-001

    The page shows winning chances and suggested moves. It supports undo and the swap rule.
    """
    from whet.recipes.hex.play.server import serve_game

    if color not in ("blue", "red"):
        raise UsageError("unknown color", got=color, try_="--color blue or --color red")
    player, sizes = _load_player(player_name, device=device)
    size = size if size is not None else sizes[0] if len(sizes) == 1 else 7
    if size not in sizes:
        possible = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        raise UsageError(f"{player_name} does not play on this board", got=f"--size {size}", try_=f"--size {possible}")
    code = serve_game(
        player,
        sizes=sizes,
        size=size,
        color=color,
        port=port,
        open_browser=not no_browser,
        on_ready=lambda running: output.link(
            running, as_json=json, note_text="the link works once; Ctrl-C stops the server"
        ),
        on_failure=output.failed_request,
    )
    raise typer.Exit(code)


def _load_player(name: str, *, device: str) -> "tuple[Player, tuple[int, ...]]":
    """Load a player. Return it and the board sizes that it plays on."""
    from whet.recipes.hex.game.players import NETLESS_PLAYERS, PLAYABLE_SIZES

    if name in NETLESS_PLAYERS:
        return NETLESS_PLAYERS[name], PLAYABLE_SIZES
    from whet.device.open import open_device
    from whet.recipes.hex.net_players import load_opponent

    opponent = load_opponent(name, device=open_device(device).device)
    return opponent.player, PLAYABLE_SIZES if opponent.size is None else (opponent.size,)


def arena(
    game: Annotated[str, typer.Argument(metavar="GAME", help="hex.")],
    player_a: Annotated[
        str, typer.Argument(metavar="A", help="random, two-distance, a run, or RUN@64 with simulations.")
    ],
    player_b: Annotated[str, typer.Argument(metavar="B", help="The other player.")],
    games: Annotated[int, typer.Option(min=2, max=1_000_000, help="Number of games, which must be even.")] = 400,
    size: Annotated[
        int | None, typer.Option(min=2, max=26, help="Board size. Default: the size that the runs were trained on.")
    ] = None,
    openings: Annotated[
        Literal["even", "random"],
        typer.Option(help="even: random openings in which the two-distance player sees no side ahead."),
    ] = "even",
    stones: Annotated[
        int | None, typer.Option(min=0, max=100, help="Stones of an opening. Default: 2 for random, 3 for even ones.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of openings and of choices between equal moves.")] = 0,
    checkpoint: Annotated[str, typer.Option(metavar="last|best|STEP", help="Which weights of runs to use.")] = "last",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Let two players compete in paired games with swapped colors.

    \b
    whet arena hex runs/hex-001 random
    whet arena hex runs/hex-001@64 two-distance --games 400 --openings random

    Every opening is played twice, with colors swapped. Only openings that one player wins with both colors show who is
    stronger, so openings are even by default. All games are played in parallel, so that the net evaluates positions in
    batches. The confidence interval accounts for the pairing of games.
    """
    from whet.recipes.recipe import load_recipe

    recipe = load_recipe(game)
    if not recipe.supports("play_match"):
        raise UsageError(f"{game} is not a game that whet plays", got=game, try_="hex")
    with _game_counter() as watch:
        result = recipe.play_match(
            player_a,
            player_b,
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
        output.result_json(result.as_json())
    else:
        output.result("\n".join(result.lines))


@contextmanager
def _game_counter() -> Iterator[Callable[[int, int], None] | None]:
    """Yield a function that shows how many games are finished, or None with --quiet."""
    if output.quiet:
        yield None
        return
    is_terminal, begun = sys.stderr is not None and sys.stderr.isatty(), time.monotonic()
    with output.progress("arena") as show:

        def count(finished: int, games: int) -> None:
            # If stderr is a file, show progress only for long matches.
            if is_terminal or time.monotonic() - begun > _SHORT_SECONDS:
                show("games finished:", finished, games)

        yield count
