"""How is a game shown in a browser? The routes of one player behind the guard, on loopback."""

from collections.abc import Callable, Sequence

from whet.base.errors import UsageError
from whet.hex.play.routes import Routes
from whet.hex.player import Player
from whet.web.registry import RunningServer
from whet.web.server import require_libraries, serve

NAME = "play"
PORT = 8322


def serve_game(
    player: Player,
    *,
    sizes: Sequence[int],
    size: int,
    colour: str = "blue",
    port: int = PORT,
    open_browser: bool = False,
    on_ready: Callable[[RunningServer], None] | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
) -> int:
    """Serves the page until a signal ends it; the exit code."""
    require_libraries()
    if size not in sizes:
        raise UsageError(f"{player.name} does not play on this board", got=f"{size}x{size}", try_=str(list(sizes)))
    routes = Routes(player, sizes=sizes, size=size, colour=colour)
    try:
        return serve(
            routes.routes(),
            name=NAME,
            about=player.name,
            port=port,
            open_browser=open_browser,
            on_ready=on_ready,
            on_failure=on_failure,
        )
    finally:
        routes.close()
