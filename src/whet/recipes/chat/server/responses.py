"""JSON bodies of completions, stream events and errors in OpenAI's format."""

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from whet.base.units import printable_line
from whet.recipes.chat.server.requests import BadRequestError
from whet.web.access import HttpError

_CODES = {401: "invalid_api_key"}
"""Error codes by HTTP status, as sent by OpenAI's server, that clients check for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionResponse:
    """Builds the response bodies of one completion."""

    model: str
    is_chat: bool
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, text: str, finish_reason: str, usage: dict[str, int]) -> dict[str, Any]:
        kind = "chat.completion" if self.is_chat else "text_completion"
        content = {"message": {"role": "assistant", "content": text, "error": None}} if self.is_chat else {"text": text}
        return {**self._head(kind), "choices": [self._choice(content, finish_reason)], "usage": usage}

    def chunk(self, text: str, *, is_first: bool = False, finish_reason: str | None = None) -> bytes:
        """Return a chunk of a streamed response as a server-sent event."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if text or is_first:
            delta["content"] = text
        content = {"delta": delta} if self.is_chat else {"text": text}
        return server_sent_event({**self._head(kind), "choices": [self._choice(content, finish_reason)]})

    def usage(self, usage: dict[str, int]) -> bytes:
        """Return the token usage as an event after the last chunk. Clients request it with `stream_options`."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return server_sent_event({**self._head(kind), "choices": [], "usage": usage})

    def _head(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _choice(self, content: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        return {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}


def server_sent_event(value: object) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def token_usage(num_prompt: int, num_generated: int) -> dict[str, int]:
    """Return the token counts of a request in OpenAI's format."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_generated, "total_tokens": num_prompt + num_generated}


def error_body(error: BadRequestError) -> dict[str, Any]:
    return _error(str(error), status=error.status, param=error.param, code=error.code)


def error_format(path: str, error: HttpError) -> dict[str, Any] | None:
    """Return the JSON body for an error of the web server, or None outside /v1, where errors are plain text."""
    if not f"{path}/".startswith("/v1/"):
        return None
    got = "" if error.got is None else f"; got: {error.got}"
    try_ = "" if error.try_ is None else f"; try: {error.try_}"
    message = printable_line(error.what + got + try_)
    return _error(message, status=error.status, code=_CODES.get(error.status))


def _error(message: str, *, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = {429: "rate_limit_error", 500: "server_error"}.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
