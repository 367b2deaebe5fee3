"""whet play: a game of Hex against a run, or against a player without a net."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from whet.hex.play.talk import Talk
    from whet.hex.player import Player
    from whet.web.registry import RunningServer


def play(
    who: Annotated[str, typer.Argument(metavar="PLAYER", help="two-distance, random, a run of hex, or RUN@64.")],
    size: Annotated[int | None, typer.Option(metavar="N", help="The board; a run plays on the one it knows.")] = None,
    colour: Annotated[str, typer.Option(metavar="COLOUR", help="Yours: blue (begins) or red.")] = "blue",
    terminal: Annotated[bool, typer.Option("--terminal", help="Play here, in the terminal.")] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="In the terminal: other first moves of the player.")] = 0,
    device: Annotated[str, typer.Option(metavar="NAME", help="Where a net thinks: auto, mps, cuda or cpu.")] = "auto",
    port: Annotated[int, typer.Option(metavar="N", help="The first port to try; 0 takes any.")] = 8322,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the link.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print address and link as one line of JSON.")] = False,
) -> None:
    """Play Hex in the browser or the terminal: board, chances, suggestions, undo, swap.

    \b
    whet play two-distance
    whet play two-distance --size 7 --colour red --terminal
    whet play runs/hex-001
    """
    from whet.base.errors import UsageError
    from whet.hex.board import BLUE, RED
    from whet.hex.play.server import serve_game
    from whet.hex.play.talk import Talk

    if colour not in ("blue", "red"):
        raise UsageError("no such colour", got=colour, try_="--colour blue or --colour red")
    player, sizes = _find(who, device=device)
    size = size if size is not None else sizes[0] if len(sizes) == 1 else 7
    if size not in sizes:
        told = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        raise UsageError(f"{who} does not play on this board", got=f"--size {size}", try_=f"--size {told}")
    if terminal:
        _talk(Talk(player, size, BLUE if colour == "blue" else RED, seed))
        return
    code = serve_game(
        player,
        sizes=sizes,
        size=size,
        colour=colour,
        port=port,
        open_browser=not no_browser,
        on_ready=lambda running: _tell(running, as_json=json),
        on_failure=_failed,
    )
    raise typer.Exit(code)


def _find(who: str, *, device: str) -> "tuple[Player, tuple[int, ...]]":
    """The player and the boards it plays on."""
    from whet.hex.known import KNOWN, SIZES

    if who in KNOWN:
        return KNOWN[who], SIZES
    from whet.device.open import open_device
    from whet.recipes.hex.opponents import find_opponent

    found = find_opponent(who, device=open_device(device).device)
    return found.player, SIZES if found.size is None else (found.size,)


def _talk(talk: "Talk") -> None:
    """Line by line until the person leaves, or says nothing more."""
    import sys

    from whet.cli import console

    console.result("\n".join(talk.begin()))
    while not talk.is_over:
        sys.stdout.write("> ")
        sys.stdout.flush()
        # None: closed before we began.
        line = "" if sys.stdin is None else sys.stdin.readline(200)
        if not line:
            console.result("")
            return
        answer = talk.say(line)
        if answer:
            console.result("\n".join(answer))


def _tell(running: "RunningServer", *, as_json: bool) -> None:
    from whet.cli import console

    if as_json:
        console.line_json({"url": running.url, "link": running.link(), "pid": running.pid})
    else:
        console.result(running.link())
        console.note("opens once; Ctrl-C ends it, and --terminal plays here")


def _failed(error: BaseException) -> None:
    import traceback

    from whet.cli import console

    shown = "".join(traceback.format_exception(error)) if console.debug else f"{type(error).__name__}: {error}"
    console.note(f"a request failed: {shown}")
