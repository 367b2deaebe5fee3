"""Generate one answer at a time in a worker thread; further requests wait."""

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
"""Behind the one that is being answered."""


class AnswerQueue:
    """The queue before one model."""

    def __init__(self, *, most_waiting: int = MAX_WAITING) -> None:
        self._most = most_waiting + 1
        self._num_asked = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="speaker")

    def pieces(self, say: Callable[[], Iterator[TextChunk]]) -> AsyncGenerator[TextChunk]:
        """The answer as it is written; close this iterator or let it go, and it is written no further.

        The place is taken at once: between a look at the queue and the first piece others would come.
        """
        self._refuse_too_many()
        loop = asyncio.get_running_loop()
        told: asyncio.Queue[TextChunk | BaseException | None] = asyncio.Queue()
        is_over = threading.Event()

        def tell(one: TextChunk | BaseException | None) -> None:
            if not is_over.is_set():
                loop.call_soon_threadsafe(told.put_nowait, one)

        def speak() -> None:
            try:
                if is_over.is_set():
                    return
                for piece in say():
                    tell(piece)
                    if is_over.is_set():
                        return
                tell(None)
            except BaseException as error:
                tell(error)

        self._num_asked += 1
        work = self._thread.submit(speak)
        # Counted until the thread is free again, not until the client has gone.
        work.add_done_callback(lambda _: loop.call_soon_threadsafe(self._done) if not loop.is_closed() else None)

        def end() -> None:
            is_over.set()
            work.cancel()

        async def listen() -> AsyncGenerator[TextChunk]:
            try:
                while (one := await told.get()) is not None:
                    if isinstance(one, BaseException):
                        raise one
                    yield one
            finally:
                end()

        pieces = listen()
        # A generator that is never begun has no end either: a client may go before the first piece.
        weakref.finalize(pieces, end).atexit = False
        return pieces

    async def whole(self, say: Callable[[], Iterator[TextChunk]], request: "Request") -> list[TextChunk] | None:
        """All pieces; None where the client went away meanwhile."""

        async def collect() -> list[TextChunk]:
            async with aclosing(self.pieces(say)) as pieces:
                return [piece async for piece in pieces]

        answer, gone = asyncio.ensure_future(collect()), asyncio.ensure_future(_until_gone(request))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                return None
            return answer.result()
        finally:
            for task in (answer, gone):
                task.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)

    def _refuse_too_many(self) -> None:
        if self._num_asked >= self._most:
            raise BadRequestError(
                "too many requests are waiting; ask again later", code="rate_limit_exceeded", status=429
            )

    def close(self) -> None:
        """No more answers are begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _done(self) -> None:
        self._num_asked -= 1


async def _until_gone(request: "Request") -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
