"""Server-sent events for open pages, with the changes since the last notification.

Runs are scanned only while a page is open. Pending changes are merged and not queued, so a slow page needs no more
memory than a list of the runs. The guard disconnects a page that reads nothing at all.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from concurrent.futures import Executor
from typing import Any, TypeVar

from whet.report.page.html import shorten
from whet.report.run_status import RunStatus
from whet.report.watch.listing import ListingChanges, RunListing
from whet.report.watch.run_cache import RunCache, WorkTimer
from whet.report.watch.status_reader import run_id, status_json
from whet.run import strict_json
from whet.web.access import HttpError

# Half of the connections that the server accepts, so that open pages cannot block requests.
MAX_LISTENERS = 64
_POLL_SECONDS = 1.0
# Maximum share of a core for scanning.
_MAX_CORE_SHARE = 0.05
# A regular message shows an open page that the connection is still alive.
_HEARTBEAT_SECONDS = 15.0
_MAX_GROUPS = 20

T = TypeVar("T")


class _Listener:
    """One open page and its pending changes."""

    def __init__(self, runs: Collection[str]) -> None:
        self.runs = frozenset(runs)
        """Ids of the runs that the page shows in detail."""
        self.versions: dict[str, str] = {}
        self._changed: dict[str, RunStatus] = {}
        self._removed: set[str] = set()
        self._groups: dict[str, int] | None = None
        self._new_versions: dict[str, str] = {}
        self._wake = asyncio.Event()

    def add_changes(self, changes: ListingChanges) -> None:
        for status in changes.changed:
            run = run_id(status.path.name)
            self._changed[run] = status
            self._removed.discard(run)
        for run in changes.removed:
            self._changed.pop(run, None)
            self._removed.add(run)
            self.versions.pop(run, None)  # Announce a restored run again.
        if changes.groups is not None:
            self._groups = changes.groups
        if changes:
            self._wake.set()

    def add_version(self, run: str, version: str) -> None:
        if run in self.runs and self.versions.get(run) != version:
            self.versions[run] = self._new_versions[run] = version
            self._wake.set()

    async def next_messages(self) -> list[bytes]:
        """Wait for changes, at most until the next heartbeat is due, and return the messages."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), _HEARTBEAT_SECONDS)
        self._wake.clear()
        changed, removed, groups, versions = self._changed, self._removed, self._groups, self._new_versions
        self._changed, self._removed, self._groups, self._new_versions = {}, set(), None, {}
        messages = []
        if changed or removed or groups is not None:
            statuses = [status_json(status) for status in changed.values()]
            regrouped = {} if groups is None else {"groups": groups_json(groups)}
            messages.append(_message("runs", {"changed": statuses, "removed": sorted(removed), **regrouped}))
        messages += [_message("run", {"id": run, "version": version}) for run, version in versions.items()]
        return messages or [_message("still", {})]


class UpdateFeed:
    """Scans the runs while a page is open, and sends the changes to all pages."""

    def __init__(self, listing: RunListing, cache: RunCache, executor: Executor) -> None:
        self._listing = listing
        self._cache = cache
        self._executor = executor
        self._turn = asyncio.Lock()
        self._listeners: set[_Listener] = set()
        self._polling: asyncio.Task[None] | None = None

    @property
    def num_listeners(self) -> int:
        """Number of open pages."""
        return len(self._listeners)

    async def listen(self, runs: Collection[str]) -> AsyncIterator[bytes]:
        """Yield server-sent events: `hello` (fetch all), `runs` (list changes), `run` (fetch it again), `still`."""
        listener = _Listener(runs)
        self._listeners.add(listener)
        try:
            # Register before the page fetches data, so that a change in between is announced twice rather than never.
            listener.versions = await self._in_thread(lambda: self._versions(runs))
            if self._polling is None or self._polling.done():
                self._polling = asyncio.create_task(self._poll())
            yield b"retry: 3000\n" + _message("hello", {"runs": sorted(runs)})
            while True:
                for message in await listener.next_messages():
                    yield message
                if self._polling is not None and self._polling.done():
                    self._polling.result()  # Raise the error that ended polling. The next page starts it again.
        finally:
            self._listeners.discard(listener)

    def check_capacity(self) -> None:
        """Raise HTTP 503 if too many pages are open. Call it before the response begins."""
        if self.num_listeners >= MAX_LISTENERS:
            raise HttpError(503, "too many open pages", got=self.num_listeners, try_="close some of them")

    async def scan(self) -> float:
        """Scan the runs, notify all pages, and return the seconds to pause."""
        async with self._turn:  # Send notifications in the order of the scans.
            changes, versions, pause = await self._in_thread(self._scan)
            for listener in self._listeners:
                listener.add_changes(changes)
                for run, version in versions.items():
                    listener.add_version(run, version)
        return pause

    async def _poll(self) -> None:
        while self._listeners:
            await asyncio.sleep(await self.scan())

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _scan(self) -> tuple[ListingChanges, dict[str, str], float]:
        timer = WorkTimer()
        changes = self._listing.scan()
        shown = {run for listener in tuple(self._listeners) for run in listener.runs}
        versions = self._versions(run for run in shown if not self._cache.is_paused(run))
        if self._listing.is_complete:
            return changes, versions, max(_POLL_SECONDS, timer.pause(share=_MAX_CORE_SHARE))
        return changes, versions, max(0.1, timer.seconds)

    def _versions(self, runs: Iterable[str]) -> dict[str, str]:
        versions = {}
        for run in runs:
            with contextlib.suppress(HttpError, OSError):
                versions[run] = self._cache.version(run)
        return versions


def groups_json(groups: dict[str, int]) -> list[dict[str, Any]]:
    """Return the first folders that contain runs, by name."""
    return [{"name": shorten(name), "number": number} for name, number in sorted(groups.items())[:_MAX_GROUPS]]


def _message(name: str, data: dict[str, Any]) -> bytes:
    # The JSON is on one line, so its content cannot begin another message.
    return f"event: {name}\ndata: {strict_json.encode_compact(data)}\n\n".encode()
