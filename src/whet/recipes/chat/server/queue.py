"""Generate one answer at a time in a worker thread. Further requests wait."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from whet.recipes.chat.responder import TextChunk
from whet.recipes.chat.server.requests import BadRequestError

MAX_WAITING = 8
"""The number of requests that may wait while one is answered."""


class AnswerQueue:
    """Runs generators of text chunks one after another in a worker thread."""

    def __init__(self, *, max_waiting: int = MAX_WAITING) -> None:
        # One request is answered while the others wait.
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
        """Cancel waiting requests."""
        self._thread.shutdown(wait=False, cancel_futures=True)
