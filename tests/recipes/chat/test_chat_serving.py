"""`whet serve` in a separate process with OpenAI's client, and the request queue."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from small_chat import WORDS, prepared
from whet.config.resolve import resolve_config
from whet.recipes.chat.recipe import ChatRecipe
from whet.recipes.chat.responder import TextChunk
from whet.recipes.chat.server.requests import BadRequestError
from whet.recipes.chat.server.routes import AnswerQueue, ChatRoutes
from whet.recipes.runner import train_recipe

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.torch

_ERROR = {"message", "type", "param", "code"}
HELLO: Any = [{"role": "user", "content": "I want tea."}]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A server of a model trained for one step, and its JSON description."""
    folder = tmp_path_factory.mktemp("served")
    words = [f"data={prepared(folder)}", *WORDS, "global_batch_size=4", "max_steps=1", "verify=off"]
    train_recipe(ChatRecipe(), resolve_config(ChatRecipe.Config, words), run=folder / "run", device="cpu")
    command = [sys.executable, "-m", "whet", "serve", str(folder / "run"), "--port", "0", "--device", "cpu", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield json.loads(process.stdout.readline())
    process.terminate()
    assert process.wait(120) == 143
    process.stdout.close()


@pytest.fixture
def client(logged: dict[str, Any]) -> "Iterator[openai.OpenAI]":
    # Imported by the process that runs this file only: it takes a second.
    import openai

    with openai.OpenAI(base_url=logged["base_url"], api_key=logged["api_key"], max_retries=0, timeout=300) as made:
        yield made


def test_openai_client_lists_models_completes_and_streams(client: "openai.OpenAI") -> None:
    assert [model.id for model in client.models.list()] == ["run"]
    asked: Any = {"model": "run", "messages": HELLO, "temperature": 0, "max_tokens": 8}
    whole = client.chat.completions.create(**asked)
    reported, usage = whole.choices[0], whole.usage
    assert (reported.message.role, reported.finish_reason) == ("assistant", reported.finish_reason)
    assert usage is not None
    assert 0 < usage.completion_tokens <= 8
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    longer = [*HELLO, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "What?"}]
    harmless: Any = {"user": "me", "metadata": {"a": "b"}, "presence_penalty": 0.0, "tools": [], "logprobs": False}
    history = client.chat.completions.create(**{**asked, "messages": longer, **harmless}).usage
    assert history is not None
    assert history.prompt_tokens > usage.prompt_tokens + 4
    pieces = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert (
        "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == reported.message.content
    )
    assert pieces[-1].usage == usage
    assert [piece.choices[0].finish_reason for piece in pieces if piece.choices][-1] == reported.finish_reason
    text = client.completions.create(model="run", prompt="I want", temperature=0, max_tokens=4)
    assert text.usage is not None
    assert text.choices[0].finish_reason in ("length", "stop")


def test_seeds_and_stops(client: "openai.OpenAI") -> None:
    asked: Any = {"model": "run", "messages": HELLO, "max_tokens": 30}
    one, again, other = (client.chat.completions.create(**asked, seed=seed) for seed in (1, 1, 2))
    text = one.choices[0].message.content or ""
    assert text == again.choices[0].message.content != other.choices[0].message.content
    stop = text[3:5]
    cut = client.chat.completions.create(**asked, seed=1, stop=stop).choices[0]
    assert (cut.message.content, cut.finish_reason) == (text[: text.index(stop)], "stop")


@pytest.mark.parametrize(
    ("changes", "kind", "what"),
    [
        ({"model": "gpt-4"}, "NotFoundError", "model_not_found"),
        ({"messages": []}, "BadRequestError", "messages"),
        ({"messages": [{"role": "user", "content": "tea " * 500}]}, "BadRequestError", "context_length_exceeded"),
        ({"messages": [{"role": "king", "content": "x"}]}, "BadRequestError", "role"),
        ({"max_tokens": 10**9}, "BadRequestError", "max_tokens"),
        ({"n": 1_000_000}, "BadRequestError", "n"),
        ({"temperature": -1}, "BadRequestError", "temperature"),
        ({"logprobs": True}, "BadRequestError", "logprobs is not supported"),
        ({"extra_body": {"min_p": 0.1}}, "BadRequestError", "min_p is not supported"),
        ({"extra_body": {"temprature": 0.1}}, "BadRequestError", "temprature is not supported"),
        ({"tool_choice": "required"}, "BadRequestError", "tool_choice is not supported"),
        ({"stop": [""]}, "BadRequestError", "stop takes"),
        ({"messages": [{"role": "user", "content": "x" * 300_000}]}, "APIStatusError", "413"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_invalid_requests_are_rejected(client: "openai.OpenAI", changes: dict[str, Any], kind: str, what: str) -> None:
    import openai

    with pytest.raises(getattr(openai, kind)) as logged:
        client.chat.completions.create(**{"model": "run", "messages": HELLO, **changes})
    assert what in f"{logged.value} {logged.value.code}"


@pytest.mark.parametrize(("count", "is_built"), [(1_000, False), (20, True)])
def test_messages_are_counted_before_they_are_built(count: int, is_built: bool) -> None:
    class BuiltError(Exception):
        pass

    class Reader:
        context_length = 64

        def prompt(self, turns: Any, *, max_new_tokens: int) -> Any:
            # In another thread, so that the server goes on.
            assert threading.current_thread() is not threading.main_thread()
            raise BuiltError

    class Request:
        async def body(self) -> bytes:
            return json.dumps({"model": "run", "messages": [{"role": "user", "content": "x"}] * count}).encode()

    routes = ChatRoutes(Reader(), name="run", max_tokens=8)  # type: ignore[arg-type]
    with pytest.raises(BuiltError if is_built else BadRequestError) as refused:
        asyncio.run(routes._complete_chat(Request()))  # type: ignore[arg-type]
    if not is_built:
        assert refused.value.code == "context_length_exceeded"


def test_wrong_key_host_origin_and_body_are_rejected(logged: dict[str, Any]) -> None:
    import openai

    with (
        openai.OpenAI(base_url=logged["base_url"], api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        stranger.models.list()
    assert "try: the key or the link that the command printed" in str(refused.value)
    assert (refused.value.code, refused.value.type) == ("invalid_api_key", "invalid_request_error")
    host = logged["base_url"].split("/")[2]
    good = {"Authorization": f"Bearer {logged['api_key']}", "Content-Type": "application/json"}
    for headers, body, status in (
        ({**good, "Host": "evil.example"}, b"{}", 421),
        ({**good, "Origin": "https://evil.example"}, b"{}", 403),
        ({**good, "Content-Type": "text/plain"}, b"{}", 415),
        (good, b"[" * 300_000, 413),
        (good, b"{", 400),
        (good, b"[" * 100_000, 400),
        (good, b'{"\\ud800": 1}', 400),
        (good, b'{"model": "run", "messages": [{"role": "user", "content": "\\ud800"}]}', 400),
    ):
        connection = HTTPConnection(host, timeout=300)
        connection.request("POST", "/v1/chat/completions", body, headers)
        answer = connection.getresponse()
        assert answer.status == status
        told_error = json.loads(answer.read())["error"]
        assert (answer.getheader("Content-Type"), set(told_error)) == ("application/json", _ERROR)
        assert told_error["message"]
        connection.close()
    connection = HTTPConnection(host, timeout=300)
    connection.request("GET", "/", headers={"Host": "evil.example"})
    answer = connection.getresponse()
    assert (answer.status, answer.getheader("Content-Type")) == (421, "text/plain; charset=utf-8")
    assert answer.read().startswith(b"wrong host name for this server\n  got: evil.example\n")
    connection.close()


def test_concurrent_requests_are_answered_or_rejected_with_429(client: "openai.OpenAI") -> None:
    import openai

    def ask(_: int) -> str:
        try:
            client.chat.completions.create(model="run", messages=HELLO, max_tokens=30)
        except openai.RateLimitError as error:
            return str(error.status_code)
        return "answered"

    with ThreadPoolExecutor(24) as pool:
        outcomes = list(pool.map(ask, range(24)))
    assert set(outcomes) <= {"answered", "429"}
    assert outcomes.count("answered") >= 9
    assert ask(0) == "answered"


def test_generation_stops_when_the_client_disconnects() -> None:
    """With a simulated model that would never end."""
    written: list[int] = []

    def endless() -> Iterator[TextChunk]:
        for number in range(10**9):
            written.append(number)
            time.sleep(0.005)
            yield TextChunk("x", number)

    async def listen_and_leave() -> None:
        answers = AnswerQueue(max_waiting=0)
        async with aclosing(answers.stream(endless)) as chunks:
            await anext(chunks)
            with pytest.raises(BadRequestError, match="too many"):
                await anext(answers.stream(endless))
        before = len(written)
        await asyncio.sleep(0.2)
        assert len(written) <= before + 2
        # The slot is free again.
        async with asyncio.timeout(120):
            while answers._num_pending:
                await asyncio.sleep(0.005)
        async with aclosing(answers.stream(lambda: iter([TextChunk("y", 1, "stop")]))) as chunks:
            assert [chunk.text async for chunk in chunks] == ["y"]
        answers.close()

    asyncio.run(listen_and_leave())


def test_api_key_is_not_in_the_process_list(logged: dict[str, Any]) -> None:
    words = Path(f"/proc/{logged['pid']}/cmdline")
    if not words.exists():
        pytest.skip("needs /proc")
    assert logged["api_key"].encode() not in words.read_bytes()
