"""ASGI middleware that checks every request to whet's web server.

It checks host, path, number of headers, method, origin, key, and size and type of the body, in this order. It then
calls the application, and adds the common headers to the response. A client gets an error as three lines of text, or
as JSON if `error_format` returns it. `on_failure` is called with unexpected exceptions.
"""

import html
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
# Converts an error at a path to a JSON value, or returns None to send plain text.
ErrorFormat = Callable[[str, HttpError], object | None]

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
# Redirect in HTML, because a browser would not send a SameSite=Strict cookie after an HTTP redirect.
_ENTRY = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>whet</title>'
    '<meta http-equiv="refresh" content="0;url=/{view}"><p><a href="/{view}">whet</a></html>\n'
)


class RequestGuard:
    """ASGI middleware that passes permitted requests to an application."""

    def __init__(
        self,
        app: App,
        *,
        key: ServerKey,
        hosts: Collection[str],
        view: str = "",
        methods: Collection[str] = READ_METHODS,
        limits: ClientLimits | None = None,
        error_format: ErrorFormat | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Wrap `app`. `hosts` are the accepted host names with port, `methods` the accepted methods.

        `view` is the fragment of the URL that a link opens.
        """
        self._app = app
        self._key = key
        self._hosts = frozenset(host.lower() for host in hosts)
        self._methods = frozenset(methods)
        self._entry = _ENTRY.replace("{view}", html.escape(view))
        self._limits = limits or ClientLimits()
        self._error_format = error_format
        self._on_failure = on_failure
        ports = {host.rpartition(":")[2] for host in self._hosts}
        # Browsers share cookies between all ports of a host, so the name of the cookie contains the port.
        self._cookie_name = "whet-" + "-".join(sorted(ports))

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        response = _GuardedResponse(send)
        try:
            request = RequestInfo(scope)
            # Check host and origin before the key, so that pages of other origins cannot learn whether a key is valid.
            self._check(request)
            if self._is_entry(request):
                await response.page(self._entry, cookie=f"{self._cookie_name}={self._key.cookie}")
                return
            self._check_key(request)
            await self._app(scope, _LimitedBody(receive, self._check_body(request)), response.send)
        except HttpError as error:
            await self._reject(scope, response, error)
        except WhetError as error:
            status = 400 if isinstance(error, UsageError) else 409
            await self._reject(scope, response, HttpError(status, error.what, got=error.got, try_=error.try_))
        except Exception as error:
            if self._on_failure is not None:
                self._on_failure(error)
            what = "internal error"
            try_ = "the terminal of the server shows the details"
            await self._reject(scope, response, HttpError(500, what, got=type(error).__name__, try_=try_))

    def _check(self, request: RequestInfo) -> None:
        check_host(request, self._hosts)
        if request.num_headers > self._limits.num_headers:
            raise HttpError(
                431, "too many headers", got=request.num_headers, try_=f"{self._limits.num_headers} at most"
            )
        if request.method not in self._methods:
            allowed = ", ".join(sorted(self._methods))
            error = HttpError(405, "method not allowed", got=request.method, try_=allowed)
            error.headers.append((b"allow", allowed.encode()))
            raise error
        check_origin(request, self._hosts)
        if not request.is_websocket and any("websocket" in value.lower() for value in request.all("upgrade")):
            raise HttpError(400, "websockets are not supported", got="Upgrade: websocket", try_="plain HTTP")

    def _is_entry(self, request: RequestInfo) -> bool:
        """Return whether the request has a valid ticket. Raise HttpError if it is invalid and there is no cookie."""
        if request.is_websocket or request.path != "/" or not request.query.startswith(b"token="):
            return False
        if self._has_cookie(request):
            return False
        if request.method != "GET" or request.all("sec-purpose"):
            return False  # A preview or prefetch must not invalidate the ticket.
        ticket = parse_qs(request.query.decode("latin-1"), max_num_fields=8).get("token", [""])[0]
        if self._key.spend(ticket):
            return True
        what = "this link was used before, or is for another server"
        raise HttpError(401, what, try_="run the same command again, which prints a new link for this server")

    def _check_key(self, request: RequestInfo) -> None:
        scheme, _, given = (request.one("authorization") or "").partition(" ")
        if scheme.lower() == "bearer" and self._key.is_token(given.strip()):
            return
        if not self._has_cookie(request):
            what = "this server requires its key"
            error = HttpError(401, what, try_="the key or the link that the command printed")
            error.headers.append((b"www-authenticate", b"Bearer"))
            raise error
        if (request.method not in READ_METHODS or request.is_websocket) and not is_same_origin(request):
            raise HttpError(
                403,
                "this request needs an Origin header or the token",
                got="no Origin",
                try_="Authorization: Bearer TOKEN",
            )

    def _has_cookie(self, request: RequestInfo) -> bool:
        for header in request.all("cookie"):
            for part in header.split(";"):
                name, _, value = part.strip().partition("=")
                # Check all cookies with this name, because another server on this host may have set one too.
                if name == self._cookie_name and self._key.is_cookie(value):
                    return True
        return False

    def _check_body(self, request: RequestInfo) -> int:
        """Check the headers that describe the body, and return its maximum size."""
        most = self._limits.body_bytes
        length = request.one("content-length") or "0"
        if not (length.isascii() and length.isdigit()) or len(length) > 18 or int(length) > most:
            raise HttpError(413, "the request is too large", got=f"{length} bytes", try_=f"{most:,} bytes at most")
        if request.method not in READ_METHODS:
            # Require JSON, because a form on another page can send text, but not JSON.
            kind = (request.one("content-type") or "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise HttpError(415, "the request body must be JSON", got=kind or "no type", try_="application/json")
        return most

    async def _reject(self, scope: Message, response: "_GuardedResponse", error: HttpError) -> None:
        if scope["type"] == "websocket":
            await response.send({"type": "websocket.close", "code": 1008})
        elif response.has_started:
            raise ConnectionAbortedError(error.what)  # The response has begun, so the connection must be closed.
        else:
            format_error = self._error_format
            await response.send_error(error, None if format_error is None else format_error(scope["path"], error))


class _LimitedBody:
    """An ASGI receive function that limits the size of the body."""

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
    """Sends a response, and adds the common headers."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_started = True
            # Set the security headers last, so that the application cannot weaken them.
            own = [(name, value) for name, value in message.get("headers", ()) if name.lower() not in _HEADERS]
            if not any(name.lower() == b"cache-control" for name, _ in own):
                own.append((b"cache-control", b"no-store"))
            message = {**message, "headers": [*own, *_HEADERS.items()]}
        await self._send(message)

    async def page(self, html: str, *, cookie: str) -> None:
        set_cookie = (b"set-cookie", f"{cookie}; Path=/; HttpOnly; SameSite=Strict".encode())
        await self._whole(200, html.encode(), [(b"content-type", b"text/html; charset=utf-8"), set_cookie])

    async def send_error(self, error: HttpError, formatted: object | None) -> None:
        kind = b"text/plain; charset=utf-8" if formatted is None else b"application/json"
        body = error.body() if formatted is None else json.dumps(formatted).encode()
        headers = [(b"content-type", kind), (b"connection", b"close"), *error.headers]
        await self._whole(error.status, body, headers)

    async def _whole(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        headers = [*headers, (b"content-length", str(len(body)).encode())]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})
