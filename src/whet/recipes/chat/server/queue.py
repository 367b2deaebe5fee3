"""Generate one answer at a time in a worker thread. Further requests wait."""

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TYPE_CHECKING

from whet.recipes.chat.responder import TextChunk
from whet.recipes.chat.server.requests import BadRequestError

if TYPE_CHECKING:
    from starlette.requests import Request

MAX_WAITING = 8
"""The number of requests that may wait while one is answered."""


class AnswerQueue:
    """Runs generators of text chunks one after another in a worker thread."""

    def __init__(self, *, max_waiting: int = MAX_WAITING) -> None:
        # One request is answered while the others wait.
        self._capacity = max_waiting + 1
        self._num_pending = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="responder")

    def stream(self, generate: Callable[[], Iterator[TextChunk]]) -> AsyncGenerator[TextChunk]:
        """Return the chunks of an answer as they are generated. Closing or dropping the iterator cancels the answer.

        The request is queued immediately, not at the first iteration, because another request could arrive in between.
        """
        self._check_capacity()
        loop = asyncio.get_running_loop()
        received: asyncio.Queue[TextChunk | BaseException | None] = asyncio.Queue()
        is_cancelled = threading.Event()

        def send(item: TextChunk | BaseException | None) -> None:
            if not is_cancelled.is_set():
                loop.call_soon_threadsafe(received.put_nowait, item)

        def work() -> None:
            try:
                if is_cancelled.is_set():
                    return
                for chunk in generate():
                    send(chunk)
                    if is_cancelled.is_set():
                        return
                send(None)
            # Forward every error to the client; otherwise `receive` would wait forever.
            except BaseException as error:
                send(error)

        self._num_pending += 1
        future = self._thread.submit(work)
        # Count a request until the thread is free again, not only until the client disconnects.
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._done) if not loop.is_closed() else None)

        def cancel() -> None:
            is_cancelled.set()
            future.cancel()

        async def receive() -> AsyncGenerator[TextChunk]:
            try:
                while (item := await received.get()) is not None:
                    if isinstance(item, BaseException):
                        raise item
                    yield item
            finally:
                cancel()

        chunks = receive()
        # Clean up here too: a client may disconnect early, and `finally` of a generator that was never started does not
        # run.
        weakref.finalize(chunks, cancel).atexit = False
        return chunks

    async def collect(self, generate: Callable[[], Iterator[TextChunk]], request: "Request") -> list[TextChunk] | None:
        """Return all chunks, or None if the client disconnected before the end."""

        async def read_all() -> list[TextChunk]:
            async with aclosing(self.stream(generate)) as chunks:
                return [chunk async for chunk in chunks]

        answer, disconnect = asyncio.ensure_future(read_all()), asyncio.ensure_future(_wait_for_disconnect(request))
        try:
            await asyncio.wait((answer, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                return None
            return answer.result()
        finally:
            for task in (answer, disconnect):
                task.cancel()
            await asyncio.gather(answer, disconnect, return_exceptions=True)

    def close(self) -> None:
        """Cancel waiting requests."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _check_capacity(self) -> None:
        if self._num_pending >= self._capacity:
            raise BadRequestError(
                "too many requests are waiting; try again later", code="rate_limit_exceeded", status=429
            )

    def _done(self) -> None:
        self._num_pending -= 1


async def _wait_for_disconnect(request: "Request") -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
