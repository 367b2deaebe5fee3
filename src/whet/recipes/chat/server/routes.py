"""The routes of the OpenAI-compatible server."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from whet.base.errors import WhetError
from whet.recipes.chat.generation import Sampling
from whet.recipes.chat.responder import Prompt, Responder, TextChunk
from whet.recipes.chat.server import responses
from whet.recipes.chat.server.queue import AnswerQueue
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
    """Takes pieces of an answer, gives what may be shown."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._held = ""
        self.has_come = False
        """Whether one of them was met: the answer is over."""

    def push(self, piece: str) -> str:
        """What is sure to belong to the answer.

        >>> stops = Stops(["END"])
        >>> stops.push("the E"), stops.push("NDLESS"), stops.has_come
        ('the ', '', True)
        """
        text, self._held = self._held + piece, ""
        places = [place for stop in self._texts if (place := text.find(stop)) >= 0]
        if places:
            self.has_come = True
            return text[: min(places)]
        keep = max((_overlap(text, stop) for stop in self._texts), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """What was held back, and no stop came of it."""
        held, self._held = self._held, ""
        return "" if self.has_come else held


def _overlap(text: str, stop: str) -> int:
    """How many signs at the end of the text are a beginning of the stop."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)


Handler = Callable[["Request"], Awaitable["Response"]]


class ChatRoutes:
    """The answers of one model."""

    def __init__(self, speaker: Responder, *, name: str, most_tokens: int) -> None:
        self._speaker = speaker
        self._name = name
        self._most_tokens = most_tokens
        self._answering = AnswerQueue()
        self._model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "whet"}

    def routes(self) -> list["BaseRoute"]:
        """For `web.serving.serve`."""
        from starlette.routing import Route

        return [
            Route("/v1/models", _with_error_body(self._models)),
            Route("/v1/models/{name:path}", _with_error_body(self._one_model)),
            Route("/v1/chat/completions", _with_error_body(self._chat), methods=["POST"]),
            Route("/v1/completions", _with_error_body(self._text), methods=["POST"]),
            Route("/{path:path}", _with_error_body(self._nothing), methods=["GET", "POST"]),
        ]

    def close(self) -> None:
        """No more answers are begun."""
        self._answering.close()

    async def _models(self, request: "Request") -> "Response":  # noqa: ARG002
        return _json({"object": "list", "data": [self._model]})

    async def _one_model(self, request: "Request") -> "Response":
        self._refuse_other(request.path_params["name"])
        return _json(self._model)

    async def _nothing(self, request: "Request") -> "Response":
        raise BadRequestError(f"there is nothing at {request.url.path[:100]}", code="not_found", status=404)

    async def _chat(self, request: "Request") -> "Response":
        asked: ChatCompletionRequest = parse_request(ChatCompletionRequest, await _body(request))
        self._refuse_other(asked.model)
        room = self._room(asked)
        try:
            prompt = self._speaker.prompt(asked.turns, max_new_tokens=room)
        except WhetError as error:
            raise _too_long(f"{error.what}: {error.got}") from None
        if prompt.num_left_out:
            raise _too_long(f"the model can look back on {self._speaker.num_places} tokens")
        return await self._answer(asked, prompt, request, is_chat=True)

    async def _text(self, request: "Request") -> "Response":
        asked: TextCompletionRequest = parse_request(TextCompletionRequest, await _body(request))
        self._refuse_other(asked.model)
        prompt = self._speaker.plain_prompt(asked.text)
        if len(prompt.ids) >= self._speaker.num_places:
            raise _too_long(f"the model can look back on {self._speaker.num_places} tokens")
        return await self._answer(asked, prompt, request, is_chat=False)

    async def _answer(
        self, asked: CompletionRequest, prompt: Prompt, request: "Request", *, is_chat: bool
    ) -> "Response":
        from starlette.responses import Response, StreamingResponse

        sampling, stops, room = asked.sampling, asked.stops, self._room(asked)

        def say() -> Iterator[TextChunk]:
            return _until_stop(self._speaker, prompt, sampling, stops, max_new_tokens=room)

        answer = responses.CompletionResponse(model=self._name, is_chat=is_chat)
        num_read = len(prompt.ids)
        if asked.stream:
            pieces = self._answering.pieces(say)
            wants_usage = asked.stream_options is not None and asked.stream_options.include_usage
            return StreamingResponse(
                _streamed(pieces, answer, num_read=num_read, wants_usage=wants_usage),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-store"},
            )
        said = await self._answering.whole(say, request)
        if said is None:
            return Response(status_code=499)  # Nobody reads it.
        text, last = "".join(piece.text for piece in said), said[-1]
        return _json(answer.whole(text, last.end or "stop", responses.token_usage(num_read, last.num_tokens)))

    def _room(self, asked: CompletionRequest) -> int:
        """Tokens that the answer may have."""
        if asked.most_tokens is not None and asked.most_tokens > self._speaker.num_places:
            raise BadRequestError(
                f"max_tokens is {asked.most_tokens}; the model has room for {self._speaker.num_places} in all",
                param="max_tokens",
            )
        return min(self._most_tokens, asked.most_tokens or self._most_tokens)

    def _refuse_other(self, name: str) -> None:
        if name != self._name:
            raise BadRequestError(
                f"no such model: {name[:100]!r}; there is {self._name!r}",
                param="model",
                code="model_not_found",
                status=404,
            )


def _until_stop(
    speaker: Responder, prompt: Prompt, sampling: Sampling, texts: tuple[str, ...], *, max_new_tokens: int
) -> Iterator[TextChunk]:
    """An answer, up to a text that ends it."""
    stops = StopSequences(texts)
    for piece in speaker.say(prompt, max_new_tokens=max_new_tokens, sampling=sampling):
        text = stops.push(piece.text)
        if stops.has_come:
            yield TextChunk(text, piece.num_tokens, "stop")
            return
        yield TextChunk(text + stops.rest() if piece.end else text, piece.num_tokens, piece.end)


async def _streamed(
    pieces: AsyncGenerator[TextChunk], answer: responses.CompletionResponse, *, num_read: int, wants_usage: bool
) -> AsyncIterator[bytes]:
    num_said, is_first = 0, True
    async with aclosing(pieces):
        async for piece in pieces:
            num_said = piece.num_tokens
            if piece.text or is_first or piece.end:
                yield answer.piece(piece.text, is_first=is_first, end=piece.end)
                is_first = False
    if wants_usage:
        yield answer.usage(responses.token_usage(num_read, num_said))
    yield responses.DONE


async def _body(request: "Request") -> Any:
    import json

    try:
        return json.loads(await request.body(), parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        raise BadRequestError("the body is not valid JSON") from None


def _reject_constant(word: str) -> Any:
    raise ValueError(word)


def _too_long(why: str) -> BadRequestError:
    return BadRequestError(f"the conversation is too long: {why}", param="messages", code="context_length_exceeded")


def _with_error_body(handler: Handler) -> Handler:
    """The same, with what is wrong told in OpenAI's shape."""

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
