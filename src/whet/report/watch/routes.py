"""Which address answers what? Reading only; runs are named by ids from the list, never by a path.

    GET /                                  the page
    GET /static/NAME                       its files
    GET /api/runs                          {"runs": [RunLine...], "groups": [{"name", "number"}...], "is_complete",
                                           "folder", "now"}; the newest first
    GET /api/runs/ID                       RunView (report/view.py)
    GET /api/runs/ID/events                {"events": [{kind, time, step, fields}...], "before"}; the newest first
        ?before=PLACE&kinds=a,b&limit=N        the page after; without `kinds` all but steps and health
    GET /api/compare?ids=ID,ID             Comparison (report/comparing.py)
    GET /api/stream?run=ID,ID              server-sent events:
        hello  {"runs": [ids]}                 fetch all that is shown (also after a connection was lost)
        runs   {"changed": [RunLine...], "removed": [ids]}, and "groups" where they changed
        run    {"id", "version"}               this run has something new: fetch it again
        still  {}                              nothing new, every 15 seconds

Answers of runs and files carry an ETag. A run whose log is read for the first time, which can take a minute, answers
202 with how far that is, until somebody who asks again gets it.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from whet.report.comparing import MOST_RUNS
from whet.report.watch.feed import Feed, shown_groups
from whet.report.watch.files import ICON, PAGE, page_files
from whet.report.watch.line import run_id
from whet.report.watch.listing import Listing
from whet.report.watch.looking import Looking
from whet.report.watch.paging import MOST_EVENTS, page_of_events
from whet.report.watch.shorten import shorten
from whet.run import strict_json
from whet.web.refusal import RefusedError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

T = TypeVar("T")
_FRESH_SECONDS = 1.0
_ID_LENGTH = len(run_id(""))


class Routes:
    """The answers, for one folder of runs."""

    def __init__(self, folder: Path) -> None:
        self._name = folder.name
        self._listing = Listing(folder)
        self._looking = Looking(self._listing)
        # Two, so that a large run does not keep another one waiting.
        self._readers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="reader")
        # The list waits for no run, however many pages wait for theirs.
        self._lister = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lister")
        self._feed = Feed(self._listing, self._looking, self._lister)
        self._files = page_files()

    def routes(self) -> list["BaseRoute"]:
        """For `web.serving.serve`."""
        from starlette.routing import Route

        return [
            Route("/", self._page),
            Route("/favicon.ico", self._icon),
            Route("/static/{name}", self._static),
            Route("/api/runs", self._runs),
            Route("/api/runs/{id}", self._run),
            Route("/api/runs/{id}/events", self._events),
            Route("/api/compare", self._compare),
            Route("/api/stream", self._stream),
        ]

    def close(self) -> None:
        """Leaves whatever is being read."""
        self._looking.close()
        for pool in (self._readers, self._lister):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    async def _page(self, request: "Request") -> "Response":
        return self._file(request, PAGE)

    async def _icon(self, request: "Request") -> "Response":
        """Browsers ask for it before they have read a page that names another."""
        return self._file(request, ICON)

    async def _static(self, request: "Request") -> "Response":
        return self._file(request, request.path_params["name"])

    def _file(self, request: "Request", name: str) -> "Response":
        found = self._files.get(name)
        if found is None:
            raise RefusedError(404, "the page has no such file", got=name, try_="/")
        return _tagged(request, found.body, tag=found.tag, kind=found.kind)

    async def _runs(self, request: "Request") -> "Response":  # noqa: ARG002
        if time.monotonic() - self._listing.looked_at > _FRESH_SECONDS:
            await self._feed.look()
        answer = {
            "runs": [line.as_json() for line in self._listing.lines()],
            "groups": shown_groups(self._listing.groups),
            "is_complete": self._listing.is_complete,
            "folder": shorten(self._name),
            "now": time.time(),
        }
        return _json(strict_json.compact(answer).encode())

    async def _run(self, request: "Request") -> "Response":
        ident = _ident(request.path_params["id"])
        seen = await self._in_thread(lambda: self._looking.view(ident))
        return _tagged(request, seen.body, tag=seen.version, kind="application/json")

    async def _events(self, request: "Request") -> "Response":
        ident = _ident(request.path_params["id"])
        asked = request.query_params
        kinds = frozenset(asked["kinds"].split(",")) if "kinds" in asked else None
        limit = asked.get("limit", "100")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 6 and 1 <= int(limit) <= MOST_EVENTS):
            raise RefusedError(400, "not a number of events", got=limit, try_=f"1 to {MOST_EVENTS}")

        def read() -> bytes:
            with self._looking.history(ident) as history:
                found, before = page_of_events(history, before=asked.get("before"), kinds=kinds, most=int(limit))
            return strict_json.compact({"events": found, "before": before}).encode()

        return _json(await self._in_thread(read))

    async def _compare(self, request: "Request") -> "Response":
        idents = _idents(request.query_params.get("ids"))
        return _json(await self._in_thread(lambda: self._looking.comparison(idents)))

    async def _stream(self, request: "Request") -> "Response":
        from starlette.responses import StreamingResponse

        idents = _idents(request.query_params.get("run"))
        self._feed.refuse_too_many()
        return StreamingResponse(self._feed.listen(idents), media_type="text/event-stream")


def lower_priority() -> None:
    """Lets everything else on this machine go first: a page may be late, a training should not."""
    with contextlib.suppress(OSError):
        os.nice(5)


def _ident(given: str) -> str:
    if len(given) != _ID_LENGTH or not set(given) <= set("0123456789abcdef"):
        raise RefusedError(404, "no such run", got=given, try_="/api/runs")
    return given


def _idents(given: str | None) -> list[str]:
    idents = list(dict.fromkeys(part for part in (given or "").split(",") if part))
    if len(idents) > MOST_RUNS:
        raise RefusedError(400, "too many runs at once", got=len(idents), try_=f"{MOST_RUNS} at most")
    return [_ident(one) for one in idents]


def _json(body: bytes) -> "Response":
    from starlette.responses import Response

    return Response(body, media_type="application/json")


def _tagged(request: "Request", body: bytes, *, tag: str, kind: str) -> "Response":
    """An answer that need not be sent again to somebody who has it."""
    from starlette.responses import Response

    headers = {"ETag": f'"{tag}"', "Cache-Control": "no-cache, private"}
    if request.headers.get("if-none-match") == f'"{tag}"':
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=kind, headers=headers)
