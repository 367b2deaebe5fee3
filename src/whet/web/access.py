"""Access checks of a request: host, origin, key and limits.

Any page in a browser can send requests to the loopback address. A page whose host name resolves to 127.0.0.1 (DNS
rebinding) can even read the responses. The headers Origin and Sec-Fetch-Site, which pages cannot forge, detect the
first attack. Host detects the second. Sites do not depend on ports: a page of another server on this machine is
"same-site", and its requests include the cookie of this server. Therefore only "same-origin" is accepted.
"""

import hmac
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from whet.base.errors import WhetError
from whet.base.units import printable

READ_METHODS = frozenset(("GET", "HEAD"))


class HttpError(WhetError):
    """Raised for a rejected request, with its HTTP status. Handlers raise it too: `HttpError(404, "no such run")`."""

    def __init__(self, status: int, what: str, *, got: object = None, try_: str | None = None) -> None:
        super().__init__(what, got=None if got is None else str(got)[:200], try_=try_)
        self.status = status
        self.headers: list[tuple[bytes, bytes]] = []

    def body(self) -> bytes:
        """Return the three lines of the error as plain text, without control characters."""
        return (printable(str(self)) + "\n").encode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits for clients, generous for a browser. A client that exceeds one gets an error or is disconnected."""

    header_bytes: int = 16 * 1024
    """Maximum bytes of the request line and all headers."""
    num_headers: int = 64
    body_bytes: int = 64 * 1024
    connections: int = 128
    """Maximum open connections. A further one disconnects the oldest idle client. (macOS allows 256 open files.)"""
    receive_seconds: float = 10.0
    """Maximum time from the start of a connection or request to the last byte of the request."""
    idle_seconds: float = 15.0
    """Maximum time between two requests on one connection."""
    stall_seconds: float = 10.0
    """Maximum time for which a client reads nothing of a pending response."""


class ServerKey:
    """The secret of one server: a random token, with the tickets and the cookie derived from it.

    Programs send the token (`Authorization: Bearer`), which is in a file that only its owner can read. A link contains
    a ticket that works once, so a link from a browser history or a log is useless. The browser exchanges the ticket for
    a cookie. The token cannot be derived from a ticket or a cookie.
    """

    def __init__(self, token: str | None = None) -> None:
        """Create a new key, or recreate the key of a running server from its token."""
        self.token = token or secrets.token_urlsafe(32)
        self._spent: set[str] = set()

    def ticket(self) -> str:
        """Return a ticket for a link, valid once. Any process that has the token can create tickets."""
        nonce = secrets.token_urlsafe(12)
        return f"{nonce}.{self._sign('link', nonce)}"

    def spend(self, ticket: str) -> bool:
        """Use up a ticket. Return whether it was valid and unused."""
        nonce, _, signature = ticket.partition(".")
        is_ours = _constant_time_equal(signature, self._sign("link", nonce))
        if not is_ours or nonce in self._spent:
            return False
        self._spent.add(nonce)
        return True

    @property
    def cookie(self) -> str:
        """The cookie value that identifies a browser."""
        return self._sign("cookie", "")

    def is_token(self, value: str) -> bool:
        return _constant_time_equal(value, self.token)

    def is_cookie(self, value: str) -> bool:
        return _constant_time_equal(value, self.cookie)

    def _sign(self, purpose: str, nonce: str) -> str:
        return hmac.digest(self.token.encode(), f"{purpose}:{nonce}".encode("utf-8", "replace"), "sha256").hex()


class RequestInfo:
    """The parts of a request that the guard checks."""

    def __init__(self, scope: Mapping[str, Any]) -> None:
        self.is_websocket = scope["type"] == "websocket"
        self.method: str = "GET" if self.is_websocket else scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self._headers: list[tuple[bytes, bytes]] = list(scope["headers"])

    @property
    def num_headers(self) -> int:
        return len(self._headers)

    def all(self, name: str) -> list[str]:
        """Return all values of a request header."""
        wanted = name.encode()
        return [value.decode("latin-1") for key, value in self._headers if key.lower() == wanted]

    def one(self, name: str) -> str | None:
        """Return the value of a header that occurs exactly once, or None."""
        values = self.all(name)
        return values[0] if len(values) == 1 else None

    @property
    def is_navigation(self) -> bool:
        """Whether a browser opens this URL as a top-level page, which other pages cannot read."""
        modes, targets = self.all("sec-fetch-mode"), self.all("sec-fetch-dest")
        return self.method in READ_METHODS and modes == ["navigate"] and targets == ["document"]


def check_host(request: RequestInfo, hosts: Iterable[str]) -> None:
    """Raise HttpError if the request is not addressed to one of these hosts."""
    host = request.one("host")
    if host is None or host.lower() not in hosts:
        got = ", ".join(request.all("host")) or "no Host"
        raise HttpError(421, "wrong host name for this server", got=got, try_="the address that it printed")
    if not request.path.startswith("/"):
        # An absolute URL in the request line would take precedence over Host. OPTIONS may have "*" as its path.
        raise HttpError(400, "a path must begin with /", got=request.path, try_="/")


def check_origin(request: RequestInfo, hosts: Iterable[str]) -> None:
    """Raise HttpError if a page of another origin sent the request. Only browsers send the checked headers."""
    origins = request.all("origin")
    if any(origin.lower() not in {f"http://{host}" for host in hosts} for origin in origins):
        raise _cross_origin(", ".join(origins))
    if request.is_navigation:
        return
    sites = request.all("sec-fetch-site")
    is_read = request.method in READ_METHODS and not request.is_websocket
    allowed = {"same-origin", "none"} if is_read else {"same-origin"}
    if any(site not in allowed for site in sites):
        raise _cross_origin(f"Sec-Fetch-Site: {', '.join(sites)}")


def is_same_origin(request: RequestInfo) -> bool:
    """Return whether a browser sent the origin. Call it after `check_origin`, which only accepts the server's own."""
    return bool(request.all("origin") or request.all("sec-fetch-site"))


def _cross_origin(got: str) -> HttpError:
    return HttpError(403, "cross-origin request refused", got=got, try_="open this server's own page")


def _constant_time_equal(one: str, other: str) -> bool:
    # The time of `==` depends on the first difference, which would let an attacker guess a secret byte by byte.
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))
