"""The web page for playing Hex, and its HTTP API.

GET /api/about                      {"player", "sizes": [...], "size", "color"}
GET /api/game?size=&moves=&seed=    the game after these moves, with the player's reply (`view.GameView`)
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from whet.base.errors import UsageError
from whet.recipes.hex.game.board import MAX_SIZE, SWAP, parse_cell
from whet.recipes.hex.game.players import Player
from whet.recipes.hex.play.view import view_game
from whet.report.watch.server import ICON_FILE, page_files
from whet.run import strict_json
from whet.web.access import HttpError
from whet.web.registry import RunningServer
from whet.web.server import require_libraries, serve

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute


STATIC = Path(__file__).parent / "static"
PAGE = "play.html"
# One move per cell of the largest board, and a swap.
_MAX_MOVES = MAX_SIZE**2 + 1


class PlayRoutes:
    """Request handlers of the page for one player."""

    def __init__(self, player: Player, *, sizes: Sequence[int], size: int, color: str) -> None:
        self._player, self._sizes = player, tuple(sizes)
        self._about = {"player": player.name, "sizes": list(sizes), "size": size, "color": color}
        self._files = page_files() | page_files(STATIC)
        # Analyze one position at a time, because a search uses the whole machine.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="player")

    def routes(self) -> list["BaseRoute"]:
        from starlette.routing import Route

        return [
            Route("/", self._page),
            Route("/favicon.ico", self._icon),
            Route("/static/{name}", self._static),
            Route("/api/about", self._get_about),
            Route("/api/game", self._game),
        ]

    def close(self) -> None:
        """Stop a running search, which Python would otherwise wait for at exit."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        if (stop := getattr(self._player, "stop", None)) is not None:
            stop()

    async def _page(self, request: "Request") -> "Response":  # noqa: ARG002
        return self._file(PAGE)

    async def _icon(self, request: "Request") -> "Response":  # noqa: ARG002
        return self._file(ICON_FILE)

    async def _static(self, request: "Request") -> "Response":
        return self._file(request.path_params["name"])

    def _file(self, name: str) -> "Response":
        from starlette.responses import Response

        file = self._files.get(name)
        if file is None:
            raise HttpError(404, "the page has no such file", got=name, try_="/")
        return Response(file.body, media_type=file.media_type, headers={"Cache-Control": "no-cache, private"})

    async def _get_about(self, request: "Request") -> "Response":  # noqa: ARG002
        return _json(self._about)

    async def _game(self, request: "Request") -> "Response":
        params = request.query_params
        size = _number(params.get("size"), "size")
        if size not in self._sizes:
            sizes = ", ".join(map(str, self._sizes))
            raise UsageError(f"{self._player.name} does not play on this board", got=f"{size}x{size}", try_=sizes)
        names = [name for name in params.get("moves", "").split(",") if name]
        if len(names) > _MAX_MOVES:
            raise UsageError("more moves than a board has cells", got=len(names), try_=f"{size * size} at most")
        moves = [SWAP if name == "swap" else parse_cell(name, size=size) for name in names]
        seed = _number(params.get("seed", "0"), "seed")
        view = asyncio.get_running_loop().run_in_executor(
            self._worker, lambda: view_game(self._player, moves, size=size, seed=seed)
        )
        return _json((await view).as_json())


def _number(text: str | None, name: str) -> int:
    if text is None or not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(f"{name} must be a number", got=repr(text), try_=f"{name}=5")
    return int(text)


def _json(value: object) -> "Response":
    from starlette.responses import Response

    return Response(strict_json.encode_compact(value).encode(), media_type="application/json")


NAME = "play"
PORT = 8322


def serve_game(
    player: Player,
    *,
    sizes: Sequence[int],
    size: int,
    color: str = "blue",
    port: int = PORT,
    open_browser: bool = False,
    on_ready: Callable[[RunningServer], None] | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
) -> int:
    """Serve the page until a signal arrives. Return the exit code."""
    require_libraries()
    if size not in sizes:
        raise UsageError(f"{player.name} does not play on this board", got=f"{size}x{size}", try_=str(list(sizes)))
    routes = PlayRoutes(player, sizes=sizes, size=size, color=color)
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
