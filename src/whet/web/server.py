"""Serve Starlette routes on loopback, behind the guard, until Ctrl-C or SIGTERM."""

import asyncio
import contextlib
import errno
import ipaddress
import signal
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from whet.base.errors import UsageError, WhetError
from whet.base.extras import install_hint
from whet.web.access import READ_METHODS, ClientLimits, HttpError, ServerKey
from whet.web.guard import App, ErrorFormat, Message, Receive, RequestGuard, Send
from whet.web.registry import RunningServer, open_in_browser, redirect_page, registered

if TYPE_CHECKING:
    from starlette.routing import BaseRoute


LOOPBACK = "127.0.0.1"
# If the port is in use, try this many consecutive ports.
_MAX_PORTS = 50
_BACKLOG = 128
_PORT_IN_USE = (errno.EADDRINUSE, errno.EACCES)


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """The address that a server listens on, and the host names that it accepts."""

    address: str
    port: int
    sockets: tuple[socket.socket, ...]

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def host(self) -> str:
        """The host name and port to use in links."""
        address = _own_addresses()[0] if ipaddress.ip_address(self.address).is_unspecified else self.address
        return f"{_url_host(address)}:{self.port}"

    @property
    def hosts(self) -> frozenset[str]:
        """All accepted host names with port."""
        names = {"localhost", "127.0.0.1", "[::1]"}
        if not self.is_loopback:
            names.add(_url_host(self.address))
            names.update(_url_host(address) for address in _own_addresses())
            names.add(socket.gethostname().lower())
        named = {f"{name}:{self.port}" for name in names}
        return frozenset(named | names if self.port == 80 else named)

    def set_backlog(self) -> None:
        """Restore the backlog, which asyncio has reduced to the number of connections that it accepts at once."""
        for one in self.sockets:
            one.listen(_BACKLOG)

    def close(self) -> None:
        for one in self.sockets:
            one.close()


def listen(port: int, *, address: str = LOOPBACK) -> ListenAddress:
    """Listen on the port or the next free one. Port 0 selects any free port.

    On loopback, listen on both IPv4 and IPv6, because `localhost` may mean either.
    """
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        raise UsageError("not an address", got=address, try_=f"{LOOPBACK}, or an IP address of this machine") from None
    if not 0 <= port <= 65535:
        raise UsageError("not a port", got=port, try_="a number from 1024 to 65535, or 0 for any")
    addresses = ["127.0.0.1", "::1"] if wanted.is_loopback else [str(wanted)]
    failure: OSError | None = None
    for offset in range(_MAX_PORTS):
        tried = port + offset if port else 0
        if tried > 65535:
            break
        try:
            return _bind(tried, addresses, address=str(wanted))
        except OSError as error:
            failure = error
            if error.errno not in _PORT_IN_USE:
                break
    raise WhetError(f"cannot listen on {address}", got=f"port {port}: {failure}", try_="--port 0, which takes any")


def _bind(port: int, addresses: list[str], *, address: str) -> ListenAddress:
    taken: list[socket.socket] = []
    try:
        for one in addresses:
            try:
                taken.append(_socket(one, port))
            except OSError as error:
                if one == "::1" and error.errno not in _PORT_IN_USE:
                    continue  # This machine has no IPv6, so IPv4 is enough.
                raise
            port = taken[0].getsockname()[1]
    except BaseException:
        for one_taken in taken:
            one_taken.close()
        raise
    return ListenAddress(address=address, port=port, sockets=tuple(taken))


def _socket(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Allow a restart while old connections are in TIME_WAIT.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # Without this option, the IPv6 socket may also take the IPv4 port, and the other bind() would fail.
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((address, port))
        # Listen right away, because bind() does not reserve the port, so two processes may bind the same one.
        made.listen(_BACKLOG)
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return made


def _own_addresses() -> list[str]:
    ipv4: list[str] = []
    with contextlib.suppress(OSError):
        for addresses in psutil.net_if_addrs().values():
            ipv4 += [one.address for one in addresses if one.family == socket.AF_INET]
    remote = [one for one in ipv4 if not ipaddress.ip_address(one).is_loopback]
    return remote or [LOOPBACK]


def _url_host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


# 128 plus the number of SIGTERM, as shells report it.
SIGTERM_EXIT_CODE = 143
# asyncio accepts up to this many connections at once before the monitor counts them. Each uses a file descriptor.
_ACCEPT_BATCH = 8


def serve(
    routes: Sequence["BaseRoute"],
    *,
    name: str,
    about: str,
    port: int,
    view: str = "",
    address: str = LOOPBACK,
    allow_remote: bool = False,
    open_browser: bool = False,
    methods: Collection[str] = READ_METHODS,
    limits: ClientLimits | None = None,
    error_format: ErrorFormat | None = None,
    on_ready: Callable[[RunningServer], None] | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
) -> int:
    """Serve Starlette routes until a signal arrives. Return the exit code: 0 for Ctrl-C, 143 for SIGTERM.

    Other commands find this server by `name` and `about` (`registry.find_server`). `view` is the fragment of the URL
    that its links open, such as "#/run/ID". `port` is the first port to try; 0
    selects any free port. `on_ready` is called once the server listens. Handlers report errors by raising `HttpError`.
    `on_failure` is called with unexpected exceptions, whose details the client does not see. `error_format` converts
    errors to JSON for clients that expect it.
    """
    require_libraries()
    limits = limits or ClientLimits()
    listening = listen(port, address=address)
    try:
        if not listening.is_loopback and not allow_remote:
            raise UsageError(
                "this server would be reachable from other machines",
                got=f"the address {address}",
                try_="127.0.0.1 and `ssh -L`, or allow it explicitly",
            )
        # Each server has a new key, which invalidates the links and cookies of earlier servers.
        key = ServerKey()
        guard = RequestGuard(
            _router(routes),
            key=key,
            hosts=listening.hosts,
            view=view,
            methods=methods,
            limits=limits,
            error_format=error_format,
            on_failure=on_failure,
        )
        with contextlib.ExitStack() as stack:
            running = stack.enter_context(registered(name=name, about=about, host=listening.host, key=key, view=view))
            page = stack.enter_context(redirect_page(running.link())) if open_browser else None

            def ready() -> None:
                if on_ready is not None:
                    on_ready(running)
                if page is not None:
                    open_in_browser(page)

            return _run(guard, listening=listening, limits=limits, on_ready=ready)
    finally:
        listening.close()


def require_libraries() -> None:
    """Raise WhetError if the packages for servers are not installed."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise WhetError("the server needs two more packages", got=str(error), try_=install_hint("web")) from None


def _router(routes: Sequence["BaseRoute"]) -> App:
    from starlette.exceptions import HTTPException
    from starlette.routing import Router

    async def not_found(scope: Message, receive: Receive, send: Send) -> None:  # noqa: ARG001
        raise HttpError(404, "not found", got=scope["path"], try_="/")

    router = Router(routes, default=not_found, redirect_slashes=False)

    async def routed(scope: Message, receive: Receive, send: Send) -> None:
        scope["app"] = router  # With an app in its scope, Starlette raises errors instead of responding.
        try:
            await router(scope, receive, send)
        except HTTPException as error:
            http_error = HttpError(error.status_code, error.detail.lower(), got=f"{scope['method']} {scope['path']}")
            http_error.headers += [
                (key.lower().encode(), value.encode()) for key, value in (error.headers or {}).items()
            ]
            raise http_error from None

    return routed


def _run(guard: RequestGuard, *, listening: ListenAddress, limits: ClientLimits, on_ready: Callable[[], None]) -> int:
    import uvicorn

    from whet.web.connection import ConnectionMonitor

    config = uvicorn.Config(
        guard,
        http=ConnectionMonitor(limits).connection,  # type: ignore[arg-type]  # uvicorn only calls it.
        ws="none",
        loop="asyncio",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="critical",
        access_log=False,
        # There is no proxy in front of the server, so forwarded addresses in headers must not be trusted.
        proxy_headers=False,
        server_header=False,
        date_header=False,
        workers=1,
        # The monitor enforces the limit first. uvicorn would respond with 503 before the guard runs.
        limit_concurrency=limits.connections + 1,
        timeout_keep_alive=limits.idle_seconds,  # type: ignore[arg-type]  # A float works: it is passed to call_later.
        backlog=_ACCEPT_BATCH,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=limits.header_bytes,
    )
    return _until_signalled(uvicorn.Server(config), listening=listening, on_ready=on_ready)


def _until_signalled(server: Any, *, listening: ListenAddress, on_ready: Callable[[], None]) -> int:
    """Run the server until a signal arrives, then shut it down and return the exit code.

    `uvicorn.Server.run` is not used, because it polls for signals, and raises them again after the shutdown.
    """
    received: list[int] = []

    async def wait() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def handle(number: int) -> None:
            received.append(number)
            stop.set()

        with _signals(loop, handle):
            await server.startup(sockets=list(listening.sockets))
            listening.set_backlog()
            on_ready()
            await stop.wait()
            await server.shutdown(sockets=list(listening.sockets))

    if not server.config.loaded:
        server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    asyncio.run(wait())
    return SIGTERM_EXIT_CODE if received and received[0] == signal.SIGTERM else 0


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
