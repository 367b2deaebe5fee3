"""Routes of the OpenAI-compatible server.

GET  /v1/models, /v1/models/NAME     the model
POST /v1/chat/completions            answer a conversation, in chunks if `stream` is true
POST /v1/completions                 continue a text, in chunks if `stream` is true
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from whet.base.errors import WhetError
from whet.recipes.chat.responder import Prompt, Responder, TextChunk
from whet.recipes.chat.server import responses
from whet.recipes.chat.server.requests import (
    BadRequestError,
    ChatCompletionRequest,
    CompletionRequest,
    TextCompletionRequest,
    parse_request,
)

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute


class StopSequences:
    """Ends a streamed answer at the first stop sequence. Holds back text that may be the beginning of one."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._held = ""
        self.is_stopped = False
        """Whether a stop sequence has occurred, which completes the answer."""

    def push(self, new_text: str) -> str:
        """Add generated text. Return the text that is certain to belong to the answer.

        >>> stops = StopSequences(["END"])
        >>> stops.push("the E"), stops.push("NDLESS"), stops.is_stopped
        ('the ', '', True)
        """
        text, self._held = self._held + new_text, ""
        positions = [index for stop in self._texts if (index := text.find(stop)) >= 0]
        if positions:
            self.is_stopped = True
            return text[: min(positions)]
        keep = max((_overlap(text, stop) for stop in self._texts), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """Return the text that is held back at the end of the answer. Empty if a stop sequence has occurred."""
        held, self._held = self._held, ""
        return "" if self.is_stopped else held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    limit = min(len(text), len(stop) - 1)
    return next((size for size in range(limit, 0, -1) if text.endswith(stop[:size])), 0)


MAX_WAITING = 8
"""Maximum number of requests that wait while one is answered."""


class AnswerQueue:
    """Runs generators of text chunks one after another in a worker thread."""

    def __init__(self, *, max_waiting: int = MAX_WAITING) -> None:
        # Add one for the request that is being answered.
        self._capacity = max_waiting + 1
        self._num_pending = 0
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="responder")

    async def stream(self, generate: Callable[[], Iterator[TextChunk]]) -> AsyncGenerator[TextChunk]:
        """Yield the chunks of an answer as they are generated. Closing or dropping the generator cancels the answer."""
        if self._num_pending >= self._capacity:
            raise BadRequestError(
                "too many requests are waiting; try again later", code="rate_limit_exceeded", status=429
            )
        self._num_pending += 1
        try:
            async with self._turn:
                chunks, loop = generate(), asyncio.get_running_loop()
                while (chunk := await loop.run_in_executor(self._thread, next, chunks, None)) is not None:
                    yield chunk
        finally:
            self._num_pending -= 1

    def close(self) -> None:
        """Cancel requests that are waiting for their turn."""
        self._thread.shutdown(wait=False, cancel_futures=True)


Handler = Callable[["Request"], Awaitable["Response"]]


class ChatRoutes:
    """Request handlers for one model."""

    def __init__(self, responder: Responder, *, name: str, max_tokens: int) -> None:
        self._responder = responder
        self._name = name
        self._max_tokens = max_tokens
        self._queue = AnswerQueue()
        self._model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "whet"}

    def routes(self) -> list["BaseRoute"]:
        """Return the Starlette routes for the web server."""
        from starlette.routing import Route

        return [
            Route("/v1/models", _with_error_body(self._list_models)),
            Route("/v1/models/{name:path}", _with_error_body(self._get_model)),
            Route("/v1/chat/completions", _with_error_body(self._complete_chat), methods=["POST"]),
            Route("/v1/completions", _with_error_body(self._complete_text), methods=["POST"]),
            Route("/{path:path}", _with_error_body(self._not_found), methods=["GET", "POST"]),
        ]

    def close(self) -> None:
        """Cancel requests that are waiting for their turn."""
        self._queue.close()

    async def _list_models(self, request: "Request") -> "Response":  # noqa: ARG002
        return _json({"object": "list", "data": [self._model]})

    async def _get_model(self, request: "Request") -> "Response":
        self._check_model(request.path_params["name"])
        return _json(self._model)

    async def _not_found(self, request: "Request") -> "Response":
        raise BadRequestError(f"there is nothing at {request.url.path[:100]}", code="not_found", status=404)

    async def _complete_chat(self, request: "Request") -> "Response":
        body = await _body(request)
        messages = body.get("messages") if isinstance(body, dict) else None
        # Check this before any processing: every message takes at least two tokens, for its start and its end.
        if isinstance(messages, list) and 2 * len(messages) > self._responder.context_length:
            raise self._exceeds_context()
        params: ChatCompletionRequest = parse_request(ChatCompletionRequest, body)
        self._check_model(params.model)
        turns, max_new_tokens = params.turns, self._max_new_tokens(params)
        try:
            # Use a thread, so that other requests are served while a long conversation is encoded.
            prompt = await asyncio.to_thread(self._responder.prompt, turns, max_new_tokens=max_new_tokens)
        except WhetError as error:
            raise _too_long(f"{error.what}: {error.got}") from None
        # Reject long conversations like OpenAI's server does, instead of silently dropping turns.
        if prompt.num_dropped_turns:
            raise self._exceeds_context()
        return await self._answer(params, prompt, request, is_chat=True)

    async def _complete_text(self, request: "Request") -> "Response":
        params: TextCompletionRequest = parse_request(TextCompletionRequest, await _body(request))
        self._check_model(params.model)
        prompt = await asyncio.to_thread(self._responder.text_prompt, params.text)
        if len(prompt.ids) >= self._responder.context_length:
            raise self._exceeds_context()
        return await self._answer(params, prompt, request, is_chat=False)

    async def _answer(
        self, params: CompletionRequest, prompt: Prompt, request: "Request", *, is_chat: bool
    ) -> "Response":
        from starlette.responses import Response, StreamingResponse

        # Read the options before the stream starts, so that an invalid parameter still results in an error status.
        sampling, stops, max_new_tokens = params.sampling, params.stops, self._max_new_tokens(params)

        def generate() -> Iterator[TextChunk]:
            chunks = self._responder.respond(prompt, max_new_tokens=max_new_tokens, sampling=sampling)
            return _until_stop(chunks, StopSequences(stops))

        response = responses.CompletionResponse(model=self._name, is_chat=is_chat)
        num_prompt = len(prompt.ids)
        if params.stream:
            wants_usage = params.stream_options is not None and params.stream_options.include_usage
            answer = self._queue.stream(generate)
            # Wait for the first chunk, so that a full queue still results in an error status.
            first = await anext(answer)
            return StreamingResponse(
                _stream(first, answer, response, num_prompt=num_prompt, wants_usage=wants_usage),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-store"},
            )
        chunks = []
        async with aclosing(self._queue.stream(generate)) as answer:
            async for chunk in answer:
                if await request.is_disconnected():
                    return Response(status_code=499)
                chunks.append(chunk)
        text, last = "".join(chunk.text for chunk in chunks), chunks[-1]
        usage = responses.token_usage(num_prompt, last.num_tokens)
        return _json(response.body(text, last.finish_reason or "stop", usage))

    def _max_new_tokens(self, params: CompletionRequest) -> int:
        if params.token_limit is not None and params.token_limit > self._responder.context_length:
            raise BadRequestError(
                f"max_tokens is {params.token_limit}; the model's context has {self._responder.context_length} tokens",
                param="max_tokens",
            )
        return min(self._max_tokens, params.token_limit or self._max_tokens)

    def _exceeds_context(self) -> BadRequestError:
        return _too_long(f"the model's context has {self._responder.context_length} tokens")

    def _check_model(self, name: str) -> None:
        if name != self._name:
            raise BadRequestError(
                f"no such model: {name[:100]!r}; there is {self._name!r}",
                param="model",
                code="model_not_found",
                status=404,
            )


def _until_stop(chunks: Iterator[TextChunk], stops: StopSequences) -> Iterator[TextChunk]:
    """Yield the chunks of an answer up to a stop sequence."""
    for chunk in chunks:
        text = stops.push(chunk.text)
        if stops.is_stopped:
            yield TextChunk(text, chunk.num_tokens, "stop")
            return
        text = text + stops.rest() if chunk.finish_reason else text
        yield TextChunk(text, chunk.num_tokens, chunk.finish_reason)


async def _stream(
    first: TextChunk,
    rest: AsyncGenerator[TextChunk],
    response: responses.CompletionResponse,
    *,
    num_prompt: int,
    wants_usage: bool,
) -> AsyncIterator[bytes]:
    chunk: TextChunk | None = first
    async with aclosing(rest):
        while chunk is not None:
            num_generated = chunk.num_tokens
            if chunk.text or chunk is first or chunk.finish_reason:
                yield response.chunk(chunk.text, is_first=chunk is first, finish_reason=chunk.finish_reason)
            chunk = await anext(rest, None)
    if wants_usage:
        yield response.usage(responses.token_usage(num_prompt, num_generated))
    yield responses.DONE


async def _body(request: "Request") -> Any:
    try:
        return json.loads(await request.body(), parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        raise BadRequestError("the body is not valid JSON") from None


def _reject_constant(word: str) -> Any:
    raise ValueError(word)


def _too_long(why: str) -> BadRequestError:
    return BadRequestError(f"the conversation is too long: {why}", param="messages", code="context_length_exceeded")


def _with_error_body(handler: Handler) -> Handler:
    """Wrap a handler so that a BadRequestError becomes a response in OpenAI's format."""

    async def handle(request: "Request") -> "Response":
        try:
            return await handler(request)
        except BadRequestError as error:
            response = _json(responses.error_body(error), status=error.status)
            if error.status == 429:
                response.headers["Retry-After"] = "1"
            return response

    return handle


def _json(value: object, *, status: int = 200) -> "Response":
    from starlette.responses import JSONResponse

    return JSONResponse(value, status_code=status)
