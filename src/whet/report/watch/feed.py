"""Who is listening, and what changed for each? Runs are looked at only while somebody is, and gently.

What waits for a listener is not a queue but what changed since it was last told, so a slow one costs no more than a
list of the runs; one that takes nothing at all is cut off by the guard.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from concurrent.futures import Executor
from typing import Any, TypeVar

from whet.report.page.html import shorten
from whet.report.watch.listing import ListingChanges, RunListing
from whet.report.watch.run_cache import RunCache, WorkTimer
from whet.report.watch.status_reader import ListedRun
from whet.run import strict_json
from whet.web.access import HttpError

MAX_LISTENERS = 64
_POLL_SECONDS = 1.0
_MAX_CORE_SHARE = 0.05
"""Of a core at most is spent on looking for changes."""
_HEARTBEAT_SECONDS = 15.0
_MAX_GROUPS = 20

T = TypeVar("T")


class _Listener:
    """One open page, and what it does not know yet."""

    def __init__(self, idents: Collection[str]) -> None:
        self.idents = frozenset(idents)
        self.versions: dict[str, str] = {}
        self._lines: dict[str, ListedRun] = {}
        self._removed: set[str] = set()
        self._groups: dict[str, int] | None = None
        self._runs: dict[str, str] = {}
        self._wake = asyncio.Event()

    def tell(self, changes: ListingChanges) -> None:
        for line in changes.changed:
            self._lines[line.id] = line
            self._removed.discard(line.id)
        for ident in changes.removed:
            self._lines.pop(ident, None)
            self._removed.add(ident)
            self.versions.pop(ident, None)  # It is news when it comes back, even as it was.
        if changes.groups is not None:
            self._groups = changes.groups
        if changes:
            self._wake.set()

    def tell_run(self, ident: str, version: str) -> None:
        if ident in self.idents and self.versions.get(ident) != version:
            self.versions[ident] = self._runs[ident] = version
            self._wake.set()

    async def news(self) -> list[bytes]:
        """Waits until there is something to say, for as long as a connection may be silent."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), _HEARTBEAT_SECONDS)
        self._wake.clear()
        lines, removed, groups, runs = self._lines, self._removed, self._groups, self._runs
        self._lines, self._removed, self._groups, self._runs = {}, set(), None, {}
        said = []
        if lines or removed or groups is not None:
            changed = [line.as_json() for line in lines.values()]
            told = {} if groups is None else {"groups": groups_json(groups)}
            said.append(_event("runs", {"changed": changed, "removed": sorted(removed), **told}))
        said += [_event("run", {"id": ident, "version": version}) for ident, version in runs.items()]
        return said or [_event("still", {})]


class UpdateFeed:
    """Looks at the runs while anybody listens, and tells each what is new for it."""

    def __init__(self, listing: RunListing, looking: RunCache, lister: Executor) -> None:
        self._listing = listing
        self._looking = looking
        self._lister = lister
        self._turn = asyncio.Lock()
        self._listeners: set[_Listener] = set()
        self._polling: asyncio.Task[None] | None = None

    @property
    def num_listeners(self) -> int:
        """How many pages are open."""
        return len(self._listeners)

    async def listen(self, idents: Collection[str]) -> AsyncIterator[bytes]:
        """Server-sent events: `hello` (fetch what you show), `runs` (lines of the list), `run` (fetch it), `still`."""
        listener = _Listener(idents)
        self._listeners.add(listener)
        try:
            # Before the page fetches anything: what changes later is told, once too often rather than never.
            listener.versions = await self._in_thread(lambda: self._versions(idents))
            if self._polling is None or self._polling.done():
                self._polling = asyncio.create_task(self._poll())
            yield b"retry: 3000\n" + _event("hello", {"runs": sorted(idents)})
            while True:
                for said in await listener.news():
                    yield said
                if self._polling is not None and self._polling.done():
                    self._polling.result()  # Whatever ended it is told, and a page that comes again starts it anew.
        finally:
            self._listeners.discard(listener)

    def refuse_too_many(self) -> None:
        """Says no before an answer has begun."""
        if self.num_listeners >= MAX_LISTENERS:
            raise HttpError(503, "too many pages are open", got=self.num_listeners, try_="close some of them")

    async def look(self) -> float:
        """Looks at the runs now, for whomever, and tells everybody what changed; how long to rest then."""
        async with self._turn:  # What is told last is what was seen last.
            changes, versions, rest = await self._in_thread(self._look)
            for listener in self._listeners:
                listener.tell(changes)
                for ident, version in versions.items():
                    listener.tell_run(ident, version)
        return rest

    async def _poll(self) -> None:
        while self._listeners:
            await asyncio.sleep(await self.look())

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._lister, work)

    def _look(self) -> tuple[ListingChanges, dict[str, str], float]:
        work = WorkTimer()
        changes = self._listing.look()
        watched = {ident for listener in tuple(self._listeners) for ident in listener.idents}
        versions = self._versions(ident for ident in watched if not self._looking.is_at_rest(ident))
        rest = (
            max(_POLL_SECONDS, work.rest(share=_MAX_CORE_SHARE))
            if self._listing.is_complete
            else max(0.1, work.seconds)
        )
        return changes, versions, rest

    def _versions(self, idents: Iterable[str]) -> dict[str, str]:
        found = {}
        for ident in idents:
            with contextlib.suppress(HttpError, OSError):
                found[ident] = self._looking.version(ident)
        return found


def groups_json(groups: dict[str, int]) -> list[dict[str, Any]]:
    """As a page shows them: by name, a few."""
    return [{"name": shorten(name), "number": number} for name, number in sorted(groups.items())[:_MAX_GROUPS]]


def _event(name: str, data: dict[str, Any]) -> bytes:
    # JSON on one line: nothing in it can begin another event.
    return f"event: {name}\ndata: {strict_json.encode_compact(data)}\n\n".encode()
