"""What opens a server? A random token, and what is made from it.

The token itself is for programs (`Authorization: Bearer`) and lies in a file that only its owner can read. A link
carries a ticket that opens the server once, so that it is worth nothing in a history or a log. The cookie that a
browser gets for it is a third value. From a ticket or a cookie nobody finds the token.
"""

import hmac
import secrets


class Key:
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
        is_ours = _same(signature, self._sign("link", nonce))
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
        return _same(given, self.token)

    def opens_as_cookie(self, given: str) -> bool:
        """Whether it is the cookie."""
        return _same(given, self.cookie)

    def _sign(self, purpose: str, nonce: str) -> str:
        return hmac.digest(self.token.encode(), f"{purpose}:{nonce}".encode("utf-8", "replace"), "sha256").hex()


def _same(one: str, other: str) -> bool:
    """In a time that says nothing about where they differ."""
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))
