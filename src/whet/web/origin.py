"""Was this request meant for us, and did our own page send it?

A browser is an open door behind the loopback address: any page in it may send requests there, and a page whose name is
made to point at 127.0.0.1 (DNS rebinding) may even read the answers. The first is told by Origin and Sec-Fetch-Site,
which pages cannot forge, the second by Host. Ports do not separate sites: a page of another server on this machine is
"same-site", and its requests carry our cookie. So only "same-origin" counts.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from whet.web.refusal import RefusedError

READING = frozenset(("GET", "HEAD"))


class Asked:
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
        return self.method in READING and modes == ["navigate"] and targets == ["document"]


def check_host(asked: Asked, hosts: Iterable[str]) -> None:
    """Refuses what names another host than ours, however it found the way here."""
    named = asked.one("host")
    if named is None or named.lower() not in hosts:
        given = ", ".join(asked.every("host")) or "no Host"
        raise RefusedError(421, "this server has another name", got=given, try_="the address that it printed")
    if not asked.path.startswith("/"):
        # An absolute address in the request line goes before Host; OPTIONS may also say "*".
        raise RefusedError(400, "a path begins with /", got=asked.path, try_="/")


def check_origin(asked: Asked, hosts: Iterable[str]) -> None:
    """Refuses what another page sends; programs that are no browsers send neither header."""
    origins = asked.every("origin")
    if any(origin.lower() not in {f"http://{host}" for host in hosts} for origin in origins):
        raise _foreign(", ".join(origins))
    sites = asked.every("sec-fetch-site")
    if asked.is_navigation:
        return
    allowed = {"same-origin", "none"} if asked.method in READING and not asked.is_websocket else {"same-origin"}
    if any(site not in allowed for site in sites):
        raise _foreign(f"Sec-Fetch-Site: {', '.join(sites)}")


def is_from_our_page(asked: Asked) -> bool:
    """Whether a browser says so; after `check_origin`, so what is there is right."""
    return bool(asked.every("origin") or asked.every("sec-fetch-site"))


def _foreign(got: str) -> RefusedError:
    return RefusedError(403, "another page asks", got=got, try_="open this server's own page")
