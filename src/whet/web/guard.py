"""What stands before every page and server of whet? All checks, in this order, around any ASGI application.

host, path, number of headers, method, origin, key, kind and size of the body; then the application; then the headers
that every answer carries. Whatever goes wrong is three lines of plain text for the client, or JSON where its programs
read that, and the whole of it for `on_failure`.
"""

import json
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from whet.base.errors import UsageError, WhetError
from whet.web.access import (
    READ_METHODS,
    ClientLimits,
    HttpError,
    RequestInfo,
    ServerKey,
    check_host,
    check_origin,
    is_same_origin,
)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
ErrorFormat = Callable[[str, HttpError], object | None]
"""The JSON of a refusal at a path; None for plain text."""

CONTENT_SECURITY_POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    b"content-security-policy": CONTENT_SECURITY_POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
}
_ENTRY = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>whet</title>'
    '<meta http-equiv="refresh" content="0;url=/"><p><a href="/">whet</a></html>\n'
)
"""The browser must come again from here: after a redirect it would not send the cookie of a link opened elsewhere."""


class RequestGuard:
    """An ASGI application that lets through to another one what may pass."""

    def __init__(
        self,
        app: App,
        *,
        key: ServerKey,
        hosts: Collection[str],
        methods: Collection[str] = READ_METHODS,
        limits: ClientLimits | None = None,
        error_format: ErrorFormat | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`hosts` are the names with port that are ours; a request by any other `methods` is refused."""
        self._app = app
        self._key = key
        self._hosts = frozenset(host.lower() for host in hosts)
        self._methods = frozenset(methods)
        self._limits = limits or ClientLimits()
        self._error_format = error_format
        self._on_failure = on_failure
        ports = {host.rpartition(":")[2] for host in self._hosts}
        # The servers of one host share its cookies, whatever their ports.
        self._cookie_name = "whet-" + "-".join(sorted(ports))

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        answer = _GuardedResponse(send)
        try:
            asked = RequestInfo(scope)
            self._check(asked)
            if self._is_entry(asked):
                await answer.page(_ENTRY, cookie=f"{self._cookie_name}={self._key.cookie}")
                return
            self._check_key(asked)
            await self._app(scope, _LimitedBody(receive, self._check_body(asked)), answer.send)
        except HttpError as refusal:
            await self._refuse(scope, answer, refusal)
        except WhetError as error:
            status = 400 if isinstance(error, UsageError) else 409
            await self._refuse(scope, answer, HttpError(status, error.what, got=error.got, try_=error.try_))
        except Exception as error:
            if self._on_failure is not None:
                self._on_failure(error)
            what = "this should not have happened"
            try_ = "the terminal in which the server runs says more"
            await self._refuse(scope, answer, HttpError(500, what, got=type(error).__name__, try_=try_))

    def _check(self, asked: RequestInfo) -> None:
        check_host(asked, self._hosts)
        if asked.num_headers > self._limits.num_headers:
            raise HttpError(431, "too many headers", got=asked.num_headers, try_=f"{self._limits.num_headers} at most")
        if asked.method not in self._methods:
            allowed = ", ".join(sorted(self._methods))
            refusal = HttpError(405, "this method is not known here", got=asked.method, try_=allowed)
            refusal.headers.append((b"allow", allowed.encode()))
            raise refusal
        check_origin(asked, self._hosts)
        if not asked.is_websocket and any("websocket" in value.lower() for value in asked.every("upgrade")):
            raise HttpError(400, "there are no websockets here", got="Upgrade: websocket", try_="plain HTTP")

    def _is_entry(self, asked: RequestInfo) -> bool:
        """Whether a link with a good ticket is opened; a bad one is told here, unless the browser is known anyway."""
        if asked.is_websocket or asked.path != "/" or not asked.query.startswith(b"token="):
            return False
        if self._has_cookie(asked):
            return False
        if asked.method != "GET" or asked.every("sec-purpose"):
            return False  # A look ahead (preview, prefetch) must not use up the link.
        ticket = parse_qs(asked.query.decode("latin-1"), max_num_fields=8).get("token", [""])[0]
        if self._key.spend(ticket):
            return True
        what = "this link was used before, or is of another server"
        raise HttpError(401, what, try_="the same command again: it finds this server and gives a new link")

    def _check_key(self, asked: RequestInfo) -> None:
        scheme, _, given = (asked.one("authorization") or "").partition(" ")
        if scheme.lower() == "bearer" and self._key.opens_as_bearer(given.strip()):
            return
        if not self._has_cookie(asked):
            what = "this server opens with its key"
            refusal = HttpError(401, what, try_="the key or the link that the command printed")
            refusal.headers.append((b"www-authenticate", b"Bearer"))
            raise refusal
        if (asked.method not in READ_METHODS or asked.is_websocket) and not is_same_origin(asked):
            raise HttpError(403, "a change needs to say which page it comes from", got="no Origin", try_="the token")

    def _has_cookie(self, asked: RequestInfo) -> bool:
        for header in asked.every("cookie"):
            for part in header.split(";"):
                name, _, value = part.strip().partition("=")
                # All of that name: another server of this host may have set one.
                if name == self._cookie_name and self._key.opens_as_cookie(value):
                    return True
        return False

    def _check_body(self, asked: RequestInfo) -> int:
        """How many bytes of body may come."""
        most = self._limits.body_bytes
        told = asked.one("content-length") or "0"
        if not (told.isascii() and told.isdigit()) or len(told) > 18 or int(told) > most:
            raise HttpError(413, "the request is too large", got=f"{told} bytes", try_=f"{most:,} bytes at most")
        if asked.method not in READ_METHODS:
            # A form of another page can send text, never this.
            kind = (asked.one("content-type") or "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise HttpError(415, "a change is sent as JSON", got=kind or "no type", try_="application/json")
        return most

    async def _refuse(self, scope: Message, answer: "_GuardedResponse", refusal: HttpError) -> None:
        if scope["type"] == "websocket":
            await answer.send({"type": "websocket.close", "code": 1008})
        elif answer.has_begun:
            raise ConnectionAbortedError(refusal.what)  # Too late to say it: the connection is cut.
        else:
            shape = self._error_format
            await answer.refuse(refusal, None if shape is None else shape(scope["path"], refusal))


class _LimitedBody:
    """Receives a body up to a number of bytes."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive = receive
        self._left = most
        self._most = most

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                raise HttpError(413, "the request is too large", try_=f"{self._most:,} bytes at most")
        return message


class _GuardedResponse:
    """Sends an answer with the headers that all have."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            own = [(name, value) for name, value in message.get("headers", ()) if name.lower() not in _HEADERS]
            if not any(name.lower() == b"cache-control" for name, _ in own):
                own.append((b"cache-control", b"no-store"))
            message = {**message, "headers": [*own, *_HEADERS.items()]}
        await self._send(message)

    async def page(self, html: str, *, cookie: str) -> None:
        set_cookie = (b"set-cookie", f"{cookie}; Path=/; HttpOnly; SameSite=Strict".encode())
        await self._whole(200, html.encode(), [(b"content-type", b"text/html; charset=utf-8"), set_cookie])

    async def refuse(self, refusal: HttpError, shaped: object | None) -> None:
        kind = b"text/plain; charset=utf-8" if shaped is None else b"application/json"
        body = refusal.body() if shaped is None else json.dumps(shaped).encode()
        headers = [(b"content-type", kind), (b"connection", b"close"), *refusal.headers]
        await self._whole(refusal.status, body, headers)

    async def _whole(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        headers = [*headers, (b"content-length", str(len(body)).encode())]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})
