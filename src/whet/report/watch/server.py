"""The server of the live page: routes, page files and pages of events."""

import asyncio
import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from whet.base.errors import UsageError
from whet.report.comparison import MAX_COMPARED_RUNS
from whet.report.page.html import shorten
from whet.report.watch.feed import UpdateFeed, groups_json
from whet.report.watch.listing import RunListing
from whet.report.watch.run_cache import RunCache
from whet.report.watch.status_reader import run_id
from whet.run import strict_json
from whet.run.events import History
from whet.web.access import ClientLimits, HttpError
from whet.web.registry import RunningServer, find_server
from whet.web.server import LOOPBACK, require_libraries, serve

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute


PAGE_FOLDER = Path(__file__).parent.parent / "page" / "static"
PAGE_FILE = "watch.html"
ICON_FILE = "icon.svg"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page."""

    body: bytes
    kind: str
    tag: str
    """Another one for every other content."""


def page_files(folder: Path = PAGE_FOLDER) -> dict[str, PageFile]:
    """All files of the page by name: what is not in here is not served, whatever lies on the disk."""
    found: dict[str, PageFile] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        kind = _MEDIA_TYPES.get(path.suffix)
        if kind is not None and path.is_file():
            body = path.read_bytes()
            found[path.name] = PageFile(body=body, kind=kind, tag=hashlib.sha256(body).hexdigest()[:20])
    return found


MAX_EVENTS = 500
_MAX_PAGE_BLOCKS = 400
"""Read for one page: where events of the wanted kinds are rare, a page may be short or empty and the next goes on."""
_HIDDEN_KINDS = frozenset(("step", "health"))


def event_page(
    history: History, *, before: str | None, kinds: Collection[str] | None, most: int
) -> tuple[list[dict[str, Any]], str | None]:
    """Up to `most` events before a place, and the place from which to go on (None: that was all).

    Without `kinds` all but steps and health, which curves show.
    """
    until, number = _parse_position(before)
    found: list[dict[str, Any]] = []
    num_read = 0
    for block in reversed(history.layout.blocks):
        if until is not None and block.start > until:
            continue
        if not _is_wanted(block.kinds, kinds):
            continue
        if num_read == _MAX_PAGE_BLOCKS:
            return found, f"{block.end - 1}.0"
        num_read += 1
        events = [event for event in history.read(block) if _is_wanted((event.kind,), kinds)]
        if until is not None and block.start == until:
            events = events[:number]
        for position in reversed(range(len(events))):
            event = events[position]
            fields = strict_json.to_strict(dict(event.fields))
            found.append(shorten({"kind": event.kind, "time": event.time, "step": event.step, "fields": fields}))
            if len(found) == most:
                return found, f"{block.start}.{position}"
    return found, None


def _is_wanted(there: Collection[str], kinds: Collection[str] | None) -> bool:
    return any((kind in kinds) if kinds is not None else (kind not in _HIDDEN_KINDS) for kind in there)


def _parse_position(before: str | None) -> tuple[int | None, int]:
    if before is None:
        return None, 0
    told = re.fullmatch(r"(\d{1,15})\.(\d{1,6})", before, re.ASCII)
    if told is None:
        raise HttpError(400, "no such place in a log", got=before, try_="the `before` of the page before")
    return int(told[1]), int(told[2])


T = TypeVar("T")
_FRESH_SECONDS = 1.0
_ID_LENGTH = len(run_id(""))


class WatchRoutes:
    """The answers, for one folder of runs."""

    def __init__(self, folder: Path) -> None:
        self._name = folder.name
        self._listing = RunListing(folder)
        self._looking = RunCache(self._listing)
        # Two, so that a large run does not keep another one waiting.
        self._readers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="reader")
        # The list waits for no run, however many pages wait for theirs.
        self._lister = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lister")
        self._feed = UpdateFeed(self._listing, self._looking, self._lister)
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
        return self._file(request, PAGE_FILE)

    async def _icon(self, request: "Request") -> "Response":
        """Browsers ask for it before they have read a page that names another."""
        return self._file(request, ICON_FILE)

    async def _static(self, request: "Request") -> "Response":
        return self._file(request, request.path_params["name"])

    def _file(self, request: "Request", name: str) -> "Response":
        found = self._files.get(name)
        if found is None:
            raise HttpError(404, "the page has no such file", got=name, try_="/")
        return _tagged(request, found.body, tag=found.tag, kind=found.kind)

    async def _runs(self, request: "Request") -> "Response":  # noqa: ARG002
        if time.monotonic() - self._listing.looked_at > _FRESH_SECONDS:
            await self._feed.look()
        answer = {
            "runs": [line.as_json() for line in self._listing.lines()],
            "groups": groups_json(self._listing.groups),
            "is_complete": self._listing.is_complete,
            "folder": shorten(self._name),
            "now": time.time(),
        }
        return _json(strict_json.encode_compact(answer).encode())

    async def _run(self, request: "Request") -> "Response":
        ident = _check_id(request.path_params["id"])
        seen = await self._in_thread(lambda: self._looking.view(ident))
        return _tagged(request, seen.body, tag=seen.version, kind="application/json")

    async def _events(self, request: "Request") -> "Response":
        ident = _check_id(request.path_params["id"])
        asked = request.query_params
        kinds = frozenset(asked["kinds"].split(",")) if "kinds" in asked else None
        limit = asked.get("limit", "100")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 6 and 1 <= int(limit) <= MAX_EVENTS):
            raise HttpError(400, "not a number of events", got=limit, try_=f"1 to {MAX_EVENTS}")

        def read() -> bytes:
            with self._looking.history(ident) as history:
                found, before = event_page(history, before=asked.get("before"), kinds=kinds, most=int(limit))
            return strict_json.encode_compact({"events": found, "before": before}).encode()

        return _json(await self._in_thread(read))

    async def _compare(self, request: "Request") -> "Response":
        idents = _check_ids(request.query_params.get("ids"))
        return _json(await self._in_thread(lambda: self._looking.comparison(idents)))

    async def _stream(self, request: "Request") -> "Response":
        from starlette.responses import StreamingResponse

        idents = _check_ids(request.query_params.get("run"))
        self._feed.refuse_too_many()
        return StreamingResponse(self._feed.listen(idents), media_type="text/event-stream")


def lower_priority() -> None:
    """Lets everything else on this machine go first: a page may be late, a training should not."""
    with contextlib.suppress(OSError):
        os.nice(5)


def _check_id(given: str) -> str:
    if len(given) != _ID_LENGTH or not set(given) <= set("0123456789abcdef"):
        raise HttpError(404, "no such run", got=given, try_="/api/runs")
    return given


def _check_ids(given: str | None) -> list[str]:
    idents = list(dict.fromkeys(part for part in (given or "").split(",") if part))
    if len(idents) > MAX_COMPARED_RUNS:
        raise HttpError(400, "too many runs at once", got=len(idents), try_=f"{MAX_COMPARED_RUNS} at most")
    return [_check_id(one) for one in idents]


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


SERVER_NAME = "watch"
DEFAULT_PORT = 8321


def watch_runs(
    folder: Path,
    *,
    port: int = DEFAULT_PORT,
    address: str = LOOPBACK,
    allow_remote: bool = False,
    open_browser: bool = False,
    limits: ClientLimits | None = None,
    on_ready: Callable[[RunningServer], None] | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
) -> int:
    """Serves the live page of a folder of runs (or of one run) until a signal ends it; the exit code."""
    require_libraries()
    folder = resolve_watch_folder(folder)
    lower_priority()
    routes = WatchRoutes(folder)
    try:
        return serve(
            routes.routes(),
            name=SERVER_NAME,
            about=str(folder),
            port=port,
            address=address,
            allow_remote=allow_remote,
            open_browser=open_browser,
            limits=limits,
            on_ready=on_ready,
            on_failure=on_failure,
        )
    finally:
        routes.close()


def find_watch_server(folder: Path) -> RunningServer | None:
    """The server that shows this folder now, if there is one."""
    return find_server(name=SERVER_NAME, about=str(resolve_watch_folder(folder)))


def resolve_watch_folder(folder: Path) -> Path:
    """The folder in full; it need not be there yet."""
    folder = folder.expanduser().resolve()
    if folder.exists() and not folder.is_dir():
        raise UsageError("runs lie in a folder", got=str(folder), try_="whet watch DIR")
    return folder
