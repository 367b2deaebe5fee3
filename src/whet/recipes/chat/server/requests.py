"""Parse and validate the bodies of completion requests."""

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from whet.recipes.chat.conversation import Turn
from whet.recipes.chat.formats import ROLE_NAMES
from whet.recipes.chat.generation import Sampling

_MAX_MESSAGES = 1_000
# Same limit as the OpenAI API.
_MAX_STOPS = 4
_IGNORED_KEYS = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
}
"""Parameters that are accepted and ignored, because they do not affect the answer."""
_DEFAULT_VALUES = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "best_of": 1,
    "tool_choice": "none",
    "function_call": "none",
    "modalities": ["text"],
}
"""Unsupported parameters, and the values with which they have no effect. Only these and empty values are accepted."""


class BadRequestError(Exception):
    """Raised for a request that gets an error status."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class _Text(BaseModel):
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Text] = ""

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class _StreamOptions(BaseModel):
    include_usage: bool = False


class _Format(BaseModel):
    type: Literal["text"]


class CompletionRequest(BaseModel):
    """Parameters of both chat and text completion requests."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow", strict=True)

    model: str = Field(max_length=300)
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: Literal[1] | None = None
    response_format: _Format | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > _MAX_STOPS or not all(stops):
            raise BadRequestError(f"stop takes up to {_MAX_STOPS} non-empty texts", param="stop")
        return stops

    @property
    def sampling(self) -> Sampling:
        """Sampling parameters, with OpenAI's defaults and a random default seed."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
        )

    @property
    def token_limit(self) -> int | None:
        """Requested maximum number of tokens of the answer, or None."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class ChatCompletionRequest(CompletionRequest):
    """Body of a request to /v1/chat/completions."""

    messages: Annotated[list[_Message], Field(min_length=1, max_length=_MAX_MESSAGES)]

    @property
    def turns(self) -> Sequence[Turn]:
        """The conversation. The last turn is the one to answer."""
        if self.messages[-1].role not in ("user", "tool"):
            raise BadRequestError("the last message must have the role user or tool", param="messages")
        return [Turn(ROLE_NAMES[message.role], message.text) for message in self.messages]


class TextCompletionRequest(CompletionRequest):
    """Body of a request to /v1/completions."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]

    @property
    def text(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]


def parse_request(kind: type[CompletionRequest], body: Any) -> Any:
    """Validate a request. Raise BadRequestError for the first invalid parameter."""
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    for name, value in body.items():
        if (
            name in kind.model_fields
            or name in _IGNORED_KEYS
            or value in (None, False, "", [], {}, _DEFAULT_VALUES.get(name))
        ):
            continue
        shown = name[:100].encode(errors="replace").decode()
        raise BadRequestError(f"{shown} is not supported", param=shown, code="unsupported_parameter")
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][:3])
        raise BadRequestError(f"{param}: {first['msg'][:200]}", param=param) from None
    texts = [message.text for message in getattr(request, "messages", ())] or [getattr(request, "text", "")]
    if any("\ud800" <= char <= "\udfff" for text in texts for char in text):
        raise BadRequestError("a text contains a lone surrogate", param="messages")
    return request
