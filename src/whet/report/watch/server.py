"""The server of the live page. It is read-only, and identifies runs by ids from the list, never by path.

    GET /                                  the page
    GET /static/NAME                       its files
    GET /api/runs                          {"runs": [RunStatus...], "removed": [ids], "version",
                                           "groups": [{"name", "number"}...], "is_complete", "folder", "now"};
        ?since=VERSION                         only the runs that have changed since then, newest first
    GET /api/runs/ID                       RunReport (report/run_report.py)
    GET /api/runs/ID/events                {"events": [{kind, time, step, fields}...], "before"}, newest first
        ?before=POSITION&kinds=a,b&limit=N     the next page; without `kinds`, all kinds except step and health
    GET /api/compare?ids=ID,ID             RunComparison (report/comparison.py)

A page polls every second. Runs, comparisons and files have an ETag. A report is read only when a page requests it.
"""

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
from whet.report.page.html import STATIC_FOLDER, shorten
from whet.report.watch.listing import RunListing
from whet.report.watch.run_cache import RunCache, WorkTimer
from whet.report.watch.status_reader import run_id, status_json
from whet.run import strict_json
from whet.run.events import History
from whet.run.folder import RUN_FILE
from whet.web.access import ClientLimits, HttpError
from whet.web.registry import RunningServer, find_server
from whet.web.server import LOOPBACK, require_libraries, serve

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

SERVER_NAME = "watch"
DEFAULT_PORT = 8321
PAGE_FILE = "watch.html"
ICON_FILE = "icon.svg"
MAX_EVENTS = 500
# Maximum blocks to read for one page of events, which may be short or empty if the requested kinds are rare.
_MAX_PAGE_BLOCKS = 400
_HIDDEN_KINDS = frozenset(("step", "health"))
# Minimum seconds between scans. Slow scans are followed by longer pauses, to limit the CPU share.
_SCAN_SECONDS = 1.0
_MAX_CORE_SHARE = 0.05
_MAX_GROUPS = 20
_ID_LENGTH = len(run_id(""))
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
}

T = TypeVar("T")


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
    """Serve the live page of a folder of runs, or of one run, until a signal arrives. Return the exit code.

    The link of a single run opens the page of that run, not the list.
    """
    require_libraries()
    folder = resolve_watch_folder(folder)
    with contextlib.suppress(OSError):
        os.nice(5)  # The page must not slow down a training run.
    routes = WatchRoutes(folder)
    try:
        return serve(
            routes.routes(),
            name=SERVER_NAME,
            about=str(folder),
            view=f"#/run/{run_id(folder.name)}" if (folder / RUN_FILE).is_file() else "",
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
    """Return the running server of this folder, or None."""
    return find_server(name=SERVER_NAME, about=str(resolve_watch_folder(folder)))


def resolve_watch_folder(folder: Path) -> Path:
    """Return the absolute path of a folder, which need not exist."""
    folder = folder.expanduser().resolve()
    if folder.exists() and not folder.is_dir():
        raise UsageError("not a folder of runs", got=str(folder), try_="whet watch DIR")
    return folder


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page."""

    body: bytes
    media_type: str
    tag: str
    """Hash of the content."""


def page_files(folder: Path = STATIC_FOLDER) -> dict[str, PageFile]:
    """Read all files of the page, by name. No other files are served."""
    files: dict[str, PageFile] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        media_type = _MEDIA_TYPES.get(path.suffix)
        if media_type is not None and path.is_file():
            body = path.read_bytes()
            files[path.name] = PageFile(body=body, media_type=media_type, tag=hashlib.sha256(body).hexdigest()[:20])
    return files


class WatchRoutes:
    """The request handlers for one folder of runs."""

    def __init__(self, folder: Path) -> None:
        self._name = folder.name
        self._listing = RunListing(folder)
        self._cache = RunCache(self._listing)
        # Use two threads, so that a large run does not block the others.
        self._readers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="reader")
        # Use a separate thread for the list, so that it never waits for a run.
        self._lister = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lister")
        self._scan_at = 0.0
        self._files = page_files()

    def routes(self) -> list["BaseRoute"]:
        """Return the routes for `web.server.serve`."""
        from starlette.routing import Route

        return [
            Route("/", self._page),
            Route("/favicon.ico", self._icon),
            Route("/static/{name}", self._static),
            Route("/api/runs", self._runs),
            Route("/api/runs/{id}", self._run),
            Route("/api/runs/{id}/events", self._events),
            Route("/api/compare", self._compare),
        ]

    def close(self) -> None:
        """Stop the threads that read runs."""
        for pool in (self._readers, self._lister):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    async def _page(self, request: "Request") -> "Response":
        return self._file(request, PAGE_FILE)

    async def _icon(self, request: "Request") -> "Response":
        """Return the icon that browsers request before they have read the page, which names another icon."""
        return self._file(request, ICON_FILE)

    async def _static(self, request: "Request") -> "Response":
        return self._file(request, request.path_params["name"])

    def _file(self, request: "Request", name: str) -> "Response":
        file = self._files.get(name)
        if file is None:
            raise HttpError(404, "no such file of the page", got=name, try_="/")
        return _tagged(request, file.body, tag=file.tag, media_type=file.media_type)

    async def _runs(self, request: "Request") -> "Response":
        since = request.query_params.get("since", "0")
        if not (since.isascii() and since.isdigit() and len(since) < 16):
            raise HttpError(400, "invalid version of the list", got=since, try_="the `version` of an earlier answer")
        if time.monotonic() >= self._scan_at:
            await asyncio.get_running_loop().run_in_executor(self._lister, self._scan)
        version = self._listing.version
        changes = self._listing.changes(since=int(since))
        groups = sorted(self._listing.groups.items())[:_MAX_GROUPS]
        answer = {
            "runs": [status_json(status) for status in changes.changed],
            "removed": changes.removed,
            "version": version,
            "groups": [{"name": shorten(name), "number": number} for name, number in groups],
            "is_complete": self._listing.is_complete,
            "folder": shorten(self._name),
            "now": time.time(),
        }
        return _json(strict_json.encode_compact(answer).encode())

    def _scan(self) -> None:
        if time.monotonic() < self._scan_at:
            return  # Another request has scanned in the meantime, so the list is up to date.
        timer = WorkTimer()
        self._listing.scan()
        # Reading thousands of runs for the first time takes several scans.
        pause = max(_SCAN_SECONDS, timer.pause(share=_MAX_CORE_SHARE)) if self._listing.is_complete else timer.seconds
        self._scan_at = time.monotonic() + pause

    async def _run(self, request: "Request") -> "Response":
        run = _check_id(request.path_params["id"])
        rendered = await self._in_thread(lambda: self._cache.render(run))
        return _tagged(request, rendered.body, tag=rendered.version, media_type="application/json")

    async def _events(self, request: "Request") -> "Response":
        run, query = _check_id(request.path_params["id"]), request.query_params
        kinds = frozenset(query["kinds"].split(",")) if "kinds" in query else None
        limit = query.get("limit", "100")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 6 and 1 <= int(limit) <= MAX_EVENTS):
            raise HttpError(400, "invalid number of events", got=limit, try_=f"1 to {MAX_EVENTS}")

        def read() -> bytes:
            with self._cache.history(run) as history:
                events, before = event_page(history, before=query.get("before"), kinds=kinds, limit=int(limit))
            return strict_json.encode_compact({"events": events, "before": before}).encode()

        return _json(await self._in_thread(read))

    async def _compare(self, request: "Request") -> "Response":
        runs, known = _check_ids(request.query_params.get("ids")), request.headers.get("if-none-match", "").strip('"')
        version, body = await self._in_thread(lambda: self._cache.compare(runs, known=known))
        return _tagged(request, body, tag=version, media_type="application/json")


def event_page(
    history: History, *, before: str | None, kinds: Collection[str] | None, limit: int
) -> tuple[list[dict[str, Any]], str | None]:
    """Return up to `limit` events before a position, newest first, and the next position (None at the end).

    Without `kinds`, steps and health readings are excluded, because curves show them. A position is a block and an
    index in the block, so that reading a page takes no longer for a long run.
    """
    last_block, number = _parse_position(before)
    page: list[dict[str, Any]] = []
    num_read = 0
    for block in reversed(history.layout.blocks):
        if last_block is not None and block.start > last_block:
            continue
        if not any(_is_wanted(kind, kinds) for kind in block.kinds):
            continue
        if num_read == _MAX_PAGE_BLOCKS:
            return page, f"{block.end - 1}.0"
        num_read += 1
        events = [event for event in history.read(block) if _is_wanted(event.kind, kinds)]
        if last_block is not None and block.start == last_block:
            events = events[:number]
        for position in reversed(range(len(events))):
            event = events[position]
            fields = strict_json.to_strict(dict(event.fields))
            page.append(shorten({"kind": event.kind, "time": event.time, "step": event.step, "fields": fields}))
            if len(page) == limit:
                return page, f"{block.start}.{position}"
    return page, None


def _is_wanted(kind: str, kinds: Collection[str] | None) -> bool:
    return kind in kinds if kinds is not None else kind not in _HIDDEN_KINDS


def _parse_position(before: str | None) -> tuple[int | None, int]:
    if before is None:
        return None, 0
    match = re.fullmatch(r"(\d{1,15})\.(\d{1,6})", before, re.ASCII)
    if match is None:
        raise HttpError(400, "invalid position in a log", got=before, try_="the `before` of the previous page")
    return int(match[1]), int(match[2])


def _check_id(value: str) -> str:
    if len(value) != _ID_LENGTH or not set(value) <= set("0123456789abcdef"):
        raise HttpError(404, "no such run", got=value, try_="/api/runs")
    return value


def _check_ids(value: str | None) -> list[str]:
    runs = list(dict.fromkeys(part for part in (value or "").split(",") if part))
    if len(runs) > MAX_COMPARED_RUNS:
        raise HttpError(400, "too many runs at once", got=len(runs), try_=f"{MAX_COMPARED_RUNS} at most")
    return [_check_id(run) for run in runs]


def _json(body: bytes) -> "Response":
    from starlette.responses import Response

    return Response(body, media_type="application/json")


def _tagged(request: "Request", body: bytes, *, tag: str, media_type: str) -> "Response":
    """Return a response with an ETag, or 304 if the client already has the content."""
    from starlette.responses import Response

    headers = {"ETag": f'"{tag}"', "Cache-Control": "no-cache, private"}
    if request.headers.get("if-none-match") == f'"{tag}"':
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=media_type, headers=headers)
