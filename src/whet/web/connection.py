"""Deadlines for client connections, which uvicorn does not have.

A client that sends its request slowly, sends nothing, or does not read its response occupies a file descriptor and
memory. The monitor checks all connections twice a second and disconnects such clients.
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
    """Tracks the connections of one server, and disconnects clients that exceed their limits."""

    def __init__(self, limits: ClientLimits) -> None:
        self.limits = limits
        self.num_closed = 0
        """Number of clients disconnected so far."""
        self._open: dict[MonitoredConnection, None] = {}
        self._is_checking = False

    def connection(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: Any = None
    ) -> Any:
        """Create the protocol of a new connection. Called by uvicorn."""
        return MonitoredConnection(self, config, server_state, app_state, _loop)

    def add(self, connection: "MonitoredConnection") -> None:
        """Add a connection. If there are too many, disconnect the oldest idle one."""
        self._open[connection] = None
        if len(self._open) > self.limits.connections:
            waiting = (one for one in self._open if one.is_idle)
            # If no connection is idle, disconnect the new one.
            self.disconnect(next(waiting, connection))
        if not self._is_checking:
            self._is_checking = True
            connection.loop.call_later(_CHECK_SECONDS, self._check, connection.loop)

    def remove(self, connection: "MonitoredConnection") -> None:
        """Stop tracking a closed connection."""
        self._open.pop(connection, None)

    def disconnect(self, connection: "MonitoredConnection") -> None:
        """Close a connection immediately, discarding unsent data."""
        self.num_closed += 1
        self.remove(connection)
        connection.transport.abort()

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        now = time.monotonic()
        for connection in list(self._open):
            if connection.is_overdue(now, self.limits):
                self.disconnect(connection)
        # Stop the timer while there are no connections.
        self._is_checking = bool(self._open)
        if self._is_checking:
            loop.call_later(_CHECK_SECONDS, self._check, loop)


class MonitoredConnection(H11Protocol):
    """A connection that records when it started to wait for its client."""

    def __init__(self, monitor: ConnectionMonitor, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._monitor = monitor
        self._receiving_since: float | None = None
        self._stalled_since: float | None = None
        self._unsent = 0

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def is_overdue(self, now: float, limits: ClientLimits) -> bool:
        """Return whether the client took too long to send a request or to read a response."""
        # A write buffer that does not shrink means that the client does not read.
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
        super().connection_made(transport)
        self._receiving_since = time.monotonic()
        self._monitor.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._monitor.remove(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle received bytes, and restart or stop the deadline of the request."""
        super().handle_events()
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            if self._receiving_since is None and (self.conn.trailing_data[0] or self.conn.their_state is h11.SEND_BODY):
                self._receiving_since = time.monotonic()
        else:
            self._receiving_since = None

    def on_response_complete(self) -> None:
        """Handle a complete response. The deadline of the next request begins with its first byte."""
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._receiving_since = None

    def send_400_response(self, msg: str) -> None:
        """Respond to invalid HTTP in the three-line format of all other errors."""
        if self.conn.our_state is not h11.IDLE and self.conn.our_state is not h11.SEND_RESPONSE:
            self.transport.close()  # A response is in progress, so another one cannot be sent.
            return
        error = HttpError(400, "invalid HTTP request", got=msg, try_="HTTP/1.1")
        body = error.body()
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
