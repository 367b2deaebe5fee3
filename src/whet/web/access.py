"""Access checks of a request: host, origin, key and limits."""

import hmac
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from whet.base.errors import WhetError
from whet.base.units import printable


class ServerKey:
    """The secret of one server."""

    def __init__(self, token: str | None = None) -> None:
        """A new key, or the one of a server that runs: from its token."""
        self.token = token or secrets.token_urlsafe(32)
        self._spent: set[str] = set()

    def ticket(self) -> str:
        """What a link carries; whoever has the token can make one, and the server knows it without being told."""
        nonce = secrets.token_urlsafe(12)
        return f"{nonce}.{self._sign('link', nonce)}"

    def spend(self, ticket: str) -> bool:
        """Whether the ticket is good; it is not a second time."""
        nonce, _, signature = ticket.partition(".")
        is_ours = _constant_time_equal(signature, self._sign("link", nonce))
        if not is_ours or nonce in self._spent:
            return False
        self._spent.add(nonce)
        return True

    @property
    def cookie(self) -> str:
        """What a browser keeps."""
        return self._sign("cookie", "")

    def opens_as_bearer(self, given: str) -> bool:
        """Whether it is the token."""
        return _constant_time_equal(given, self.token)

    def opens_as_cookie(self, given: str) -> bool:
        """Whether it is the cookie."""
        return _constant_time_equal(given, self.cookie)

    def _sign(self, purpose: str, nonce: str) -> str:
        return hmac.digest(self.token.encode(), f"{purpose}:{nonce}".encode("utf-8", "replace"), "sha256").hex()


def _constant_time_equal(one: str, other: str) -> bool:
    """In a time that says nothing about where they differ."""
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Generous for a page and its programs; a client beyond them is cut off."""

    header_bytes: int = 16 * 1024
    """The request line and all headers."""
    num_headers: int = 64
    body_bytes: int = 64 * 1024
    connections: int = 128
    """At once. One more, and the oldest that has not yet asked anything is cut off (macOS gives 256 files in all)."""
    receive_seconds: float = 10.0
    """From the first moment of a request (or a connection) to its last byte."""
    idle_seconds: float = 15.0
    """Between two requests on one connection."""
    stall_seconds: float = 10.0
    """Without taking a byte of an answer that waits for it."""


class HttpError(WhetError):
    """A request that is not granted. Handlers raise it too: `HttpError(404, "no such run", got=..., try_=...)`."""

    def __init__(self, status: int, what: str, *, got: object = None, try_: str | None = None) -> None:
        super().__init__(what, got=None if got is None else str(got)[:200], try_=try_)
        self.status = status
        self.headers: list[tuple[bytes, bytes]] = []

    def body(self) -> bytes:
        """The three lines; what came from the request or a run can steer nothing."""
        return (printable(str(self)) + "\n").encode("utf-8", "replace")


READ_METHODS = frozenset(("GET", "HEAD"))


class RequestInfo:
    """A request, as far as the guard looks at it."""

    def __init__(self, scope: Mapping[str, Any]) -> None:
        self.is_websocket = scope["type"] == "websocket"
        self.method: str = "GET" if self.is_websocket else scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self._headers: list[tuple[bytes, bytes]] = list(scope["headers"])

    @property
    def num_headers(self) -> int:
        """How many there are."""
        return len(self._headers)

    def every(self, name: str) -> list[str]:
        """All values of a header."""
        wanted = name.encode()
        return [value.decode("latin-1") for key, value in self._headers if key.lower() == wanted]

    def one(self, name: str) -> str | None:
        """The value of a header that comes once, else None."""
        found = self.every(name)
        return found[0] if len(found) == 1 else None

    @property
    def is_navigation(self) -> bool:
        """Whether a person opens this as a page of its own: nothing of it can be read by another page."""
        modes, targets = self.every("sec-fetch-mode"), self.every("sec-fetch-dest")
        return self.method in READ_METHODS and modes == ["navigate"] and targets == ["document"]


def check_host(asked: RequestInfo, hosts: Iterable[str]) -> None:
    """Refuses what names another host than ours, however it found the way here."""
    named = asked.one("host")
    if named is None or named.lower() not in hosts:
        given = ", ".join(asked.every("host")) or "no Host"
        raise HttpError(421, "this server has another name", got=given, try_="the address that it printed")
    if not asked.path.startswith("/"):
        # An absolute address in the request line goes before Host; OPTIONS may also say "*".
        raise HttpError(400, "a path begins with /", got=asked.path, try_="/")


def check_origin(asked: RequestInfo, hosts: Iterable[str]) -> None:
    """Refuses what another page sends; programs that are no browsers send neither header."""
    origins = asked.every("origin")
    if any(origin.lower() not in {f"http://{host}" for host in hosts} for origin in origins):
        raise _cross_origin(", ".join(origins))
    sites = asked.every("sec-fetch-site")
    if asked.is_navigation:
        return
    allowed = {"same-origin", "none"} if asked.method in READ_METHODS and not asked.is_websocket else {"same-origin"}
    if any(site not in allowed for site in sites):
        raise _cross_origin(f"Sec-Fetch-Site: {', '.join(sites)}")


def is_same_origin(asked: RequestInfo) -> bool:
    """Whether a browser says so; after `check_origin`, so what is there is right."""
    return bool(asked.every("origin") or asked.every("sec-fetch-site"))


def _cross_origin(got: str) -> HttpError:
    return HttpError(403, "another page asks", got=got, try_="open this server's own page")
