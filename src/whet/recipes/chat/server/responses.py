"""The bodies of completions, stream events and errors in OpenAI's format."""

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from whet.base.units import printable
from whet.recipes.chat.server.requests import BadRequestError
from whet.web.access import HttpError

_CODES = {401: "invalid_api_key"}
"""What OpenAI's server calls it where a client might look."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionResponse:
    """One answer of one kind, by its name."""

    model: str
    is_chat: bool
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, end: str, usage: dict[str, int]) -> dict[str, Any]:
        """All at once."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        said = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}
        return {**self._head(kind), "choices": [self._choice(said, end)], "usage": usage}

    def piece(self, text: str, *, is_first: bool = False, end: str | None = None) -> bytes:
        """A bit of it, as a server-sent event."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if text or is_first:
            delta["content"] = text
        said = {"delta": delta} if self.is_chat else {"text": text}
        return server_sent_event({**self._head(kind), "choices": [self._choice(said, end)]})

    def usage(self, usage: dict[str, int]) -> bytes:
        """What a client asks for with stream_options, behind the last piece."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return server_sent_event({**self._head(kind), "choices": [], "usage": usage})

    def _head(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _choice(self, said: dict[str, Any], end: str | None) -> dict[str, Any]:
        return {"index": 0, **said, "logprobs": None, "finish_reason": end}


def server_sent_event(value: object) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def token_usage(num_read: int, num_said: int) -> dict[str, int]:
    """Tokens of a request."""
    return {"prompt_tokens": num_read, "completion_tokens": num_said, "total_tokens": num_read + num_said}


def error_body(error: BadRequestError) -> dict[str, Any]:
    """What is wrong with a request."""
    return _error(str(error), status=error.status, param=error.param, code=error.code)


def error_format(path: str, refusal: HttpError) -> dict[str, Any] | None:
    """What the guard refuses; plain text where no client of OpenAI's asks."""
    if not f"{path}/".startswith("/v1/"):
        return None
    got = "" if refusal.got is None else f"; got: {refusal.got}"
    try_ = "" if refusal.try_ is None else f"; try: {refusal.try_}"
    message = printable(refusal.what + got + try_).replace("\n", " ")
    return _error(message, status=refusal.status, code=_CODES.get(refusal.status))


def _error(message: str, *, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = {429: "rate_limit_error", 500: "server_error"}.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
