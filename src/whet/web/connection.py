"""How long may a client take? Deadlines of one connection, which uvicorn does not set.

A client that sends its request byte by byte, sends nothing, or asks for an answer and does not take it, holds a file
and memory of ours. One look a second at all connections, while there are any, finds and cuts off those.
"""

import asyncio
import time
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from whet.web.access import ClientLimits, HttpError

_CHECK_SECONDS = 0.5


class ConnectionMonitor:
    """Looks after the connections of one server."""

    def __init__(self, limits: ClientLimits) -> None:
        self.limits = limits
        self.cut_off = 0
        """How many connections were ended by us so far."""
        self._open: dict[MonitoredConnection, None] = {}
        self._is_looking = False

    def connection(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: Any = None
    ) -> Any:
        """What uvicorn calls for each new connection."""
        return MonitoredConnection(self, config, server_state, app_state, _loop)

    def add(self, connection: "MonitoredConnection") -> None:
        """Counts a new connection; one too many pushes out the oldest that is not being answered."""
        self._open[connection] = None
        if len(self._open) > self.limits.connections:
            waiting = (one for one in self._open if one.is_waited_for)
            self.cut(next(waiting, connection))
        if not self._is_looking:
            self._is_looking = True
            connection.loop.call_later(_CHECK_SECONDS, self._look, connection.loop)

    def remove(self, connection: "MonitoredConnection") -> None:
        """It is closed."""
        self._open.pop(connection, None)

    def cut(self, connection: "MonitoredConnection") -> None:
        """Ends a connection at once, whatever it still has to send."""
        self.cut_off += 1
        self.remove(connection)
        connection.transport.abort()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = time.monotonic()
        for connection in list(self._open):
            if connection.is_overdue(now, self.limits):
                self.cut(connection)
        self._is_looking = bool(self._open)
        if self._is_looking:
            loop.call_later(_CHECK_SECONDS, self._look, loop)


class MonitoredConnection(H11Protocol):
    """One connection, and since when we wait for it."""

    def __init__(self, watch: ConnectionMonitor, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._watch = watch
        self._receiving_since: float | None = None
        self._stalled_since: float | None = None
        self._unsent = 0

    @property
    def is_waited_for(self) -> bool:
        """Whether it is for the client to say something: no request of it is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def is_overdue(self, now: float, limits: ClientLimits) -> bool:
        """Whether the client took too long with a request, or with taking an answer."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent < self._unsent:
            self._stalled_since = None
        elif self._stalled_since is None:
            self._stalled_since = now
        self._unsent = unsent
        for since, seconds in (
            (self._receiving_since, limits.receive_seconds),
            (self._stalled_since, limits.stall_seconds),
        ):
            if since is not None and now - since > seconds:
                return True
        return False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there, and should now say what it wants."""
        super().connection_made(transport)
        self._receiving_since = time.monotonic()
        self._watch.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._watch.remove(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Some bytes came: is the request complete?"""
        super().handle_events()
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            if self._receiving_since is None and (self.conn.trailing_data[0] or self.conn.their_state is h11.SEND_BODY):
                self._receiving_since = time.monotonic()
        else:
            self._receiving_since = None

    def on_response_complete(self) -> None:
        """An answer is whole; the next request may take its time to begin, not to arrive."""
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._receiving_since = None

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused like everything else."""
        if self.conn.our_state is not h11.IDLE and self.conn.our_state is not h11.SEND_RESPONSE:
            self.transport.close()  # An answer is under way: there is no place for another.
            return
        refusal = HttpError(400, "this is no HTTP request that we understand", got=msg, try_="HTTP/1.1")
        body = refusal.body()
        headers = [
            ("content-type", "text/plain; charset=utf-8"),
            ("content-length", str(len(body))),
            ("x-content-type-options", "nosniff"),
            ("cache-control", "no-store"),
            ("connection", "close"),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
