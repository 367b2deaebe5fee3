"""How is something served? `serve(routes, ...)`: behind the guard, on loopback, until Ctrl-C or SIGTERM."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from whet.base.errors import UsageError, WhetError
from whet.web.browser import open_page, page_that_opens
from whet.web.guard import App, Guard, Message, Receive, Send, Shape
from whet.web.key import Key
from whet.web.limits import Limits
from whet.web.listening import LOOPBACK, Place, listen
from whet.web.origin import READING
from whet.web.refusal import RefusedError
from whet.web.running import Running, announced

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

STOPPED_BY_SIGTERM = 143
_ACCEPTED_AT_ONCE = 8
"""So many connections asyncio takes before it lets us count them; each is a file."""


def serve(
    routes: Sequence["BaseRoute"],
    *,
    name: str,
    about: str,
    port: int,
    address: str = LOOPBACK,
    may_be_reached_by_others: bool = False,
    open_browser: bool = False,
    methods: Collection[str] = READING,
    limits: Limits | None = None,
    refusal_shape: Shape | None = None,
    on_ready: Callable[[Running], None] | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
) -> int:
    """Serves starlette routes until a signal ends it; the exit code: 0 after Ctrl-C, 143 after SIGTERM.

    `name` and `about` let another command find this server (`running.find_running`). `port` is where it begins to look
    for a free one; 0 takes any. `on_ready` is told address and link once it listens. Handlers raise `RefusedError`;
    what else they raise is told to `on_failure`, and to the client in three lines without details. Where clients
    expect JSON, `refusal_shape` makes it of refusals.
    """
    require_libraries()
    limits = limits or Limits()
    place = listen(port, address=address)
    try:
        if not place.is_loopback and not may_be_reached_by_others:
            raise UsageError(
                "others could reach this server",
                got=f"the address {address}",
                try_="127.0.0.1 and `ssh -L`, or say that this is meant",
            )
        key = Key()
        guard = Guard(
            _router(routes),
            key=key,
            hosts=place.hosts,
            methods=methods,
            limits=limits,
            refusal_shape=refusal_shape,
            on_failure=on_failure,
        )
        with contextlib.ExitStack() as stack:
            running = stack.enter_context(announced(name=name, about=about, host=place.host, key=key))
            page = stack.enter_context(page_that_opens(running.link())) if open_browser else None

            def ready() -> None:
                if on_ready is not None:
                    on_ready(running)
                if page is not None:
                    open_page(page)

            return _run(guard, place=place, limits=limits, on_ready=ready)
    finally:
        place.close()


def require_libraries() -> None:
    """Refuses where the packages for pages are not installed."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise WhetError("pages need two more packages", got=str(error), try_="pip install 'whet[web]'") from None


def _router(routes: Sequence["BaseRoute"]) -> App:
    from starlette.exceptions import HTTPException
    from starlette.routing import Router

    async def nothing_here(scope: Message, receive: Receive, send: Send) -> None:  # noqa: ARG001
        raise RefusedError(404, "there is nothing here", got=scope["path"], try_="/")

    router = Router(routes, default=nothing_here, redirect_slashes=False)

    async def routed(scope: Message, receive: Receive, send: Send) -> None:
        scope["app"] = router  # Only then starlette raises what it refuses, instead of answering in its own words.
        try:
            await router(scope, receive, send)
        except HTTPException as error:
            refused = RefusedError(error.status_code, error.detail.lower(), got=f"{scope['method']} {scope['path']}")
            refused.headers += [(key.lower().encode(), value.encode()) for key, value in (error.headers or {}).items()]
            raise refused from None

    return routed


def _run(guard: Guard, *, place: Place, limits: Limits, on_ready: Callable[[], None]) -> int:
    import uvicorn

    from whet.web.connection import Watch

    config = uvicorn.Config(
        guard,
        http=Watch(limits).connection,  # type: ignore[arg-type]  # uvicorn only calls it.
        ws="none",
        loop="asyncio",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        workers=1,
        limit_concurrency=limits.connections + 1,
        timeout_keep_alive=limits.idle_seconds,  # type: ignore[arg-type]  # It goes to call_later.
        backlog=_ACCEPTED_AT_ONCE,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=limits.header_bytes,
    )
    return _until_signalled(uvicorn.Server(config), place=place, on_ready=on_ready)


def _until_signalled(server: Any, *, place: Place, on_ready: Callable[[], None]) -> int:
    """uvicorn looks for a signal ten times a second and then dies of it; ours waits, and leaves nothing behind."""
    came: list[int] = []

    async def wait() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def handle(number: int) -> None:
            came.append(number)
            stop.set()

        with _signals(loop, handle):
            await server.startup(sockets=list(place.sockets))
            place.queue()
            on_ready()
            await stop.wait()
            await server.shutdown(sockets=list(place.sockets))

    if not server.config.loaded:
        server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    asyncio.run(wait())
    return STOPPED_BY_SIGTERM if came and came[0] == signal.SIGTERM else 0


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop, handle: Callable[[int], None]) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
