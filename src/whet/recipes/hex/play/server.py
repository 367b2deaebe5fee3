"""The web page of a game and its API."""

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
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute


STATIC = Path(__file__).parent / "static"
PAGE = "play.html"
_MAX_MOVES = MAX_SIZE**2 + 1


class PlayRoutes:
    """The answers, for one player."""

    def __init__(self, player: Player, *, sizes: "Sequence[int]", size: int, color: str) -> None:
        self._player, self._sizes = player, tuple(sizes)
        self._about = {"player": player.name, "sizes": list(sizes), "size": size, "color": color}
        self._files = page_files() | page_files(STATIC)
        # One at a time: a net that thinks takes the whole machine.
        self._thinker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="thinker")

    def routes(self) -> list["BaseRoute"]:
        """For `web.serving.serve`."""
        from starlette.routing import Route

        return [
            Route("/", self._page),
            Route("/favicon.ico", self._icon),
            Route("/static/{name}", self._static),
            Route("/api/about", self._tell),
            Route("/api/game", self._game),
        ]

    def close(self) -> None:
        """Waits for nobody: Python would wait for a long search before it ends."""
        self._thinker.shutdown(wait=False, cancel_futures=True)
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

        found = self._files.get(name)
        if found is None:
            raise HttpError(404, "the page has no such file", got=name, try_="/")
        return Response(found.body, media_type=found.media_type, headers={"Cache-Control": "no-cache, private"})

    async def _tell(self, request: "Request") -> "Response":  # noqa: ARG002
        return _json(self._about)

    async def _game(self, request: "Request") -> "Response":
        asked = request.query_params
        size = _number(asked.get("size"), "size")
        if size not in self._sizes:
            told = ", ".join(map(str, self._sizes))
            raise UsageError(f"{self._player.name} does not play on this board", got=f"{size}x{size}", try_=told)
        words = [word for word in asked.get("moves", "").split(",") if word]
        if len(words) > _MAX_MOVES:
            raise UsageError("more moves than a board has cells", got=len(words), try_=f"{size * size} at most")
        moves = [SWAP if word == "swap" else parse_cell(word, size=size) for word in words]
        seed = _number(asked.get("seed", "0"), "seed")
        thinking = asyncio.get_running_loop().run_in_executor(
            self._thinker, lambda: view_game(self._player, moves, size=size, seed=seed)
        )
        return _json((await thinking).as_json())


def _number(text: str | None, name: str) -> int:
    if text is None or not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(f"{name} is a number", got=repr(text), try_=f"{name}=5")
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
    """Serves the page until a signal ends it; the exit code."""
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
