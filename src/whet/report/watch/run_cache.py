"""A cache of the runs that open pages show. A run is rendered again only if its folder has changed."""

import contextlib
import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from whet.base.errors import WhetError
from whet.report.comparison import MAX_COMPARED_RUNS, compare_runs
from whet.report.page.html import shorten
from whet.report.run_report import RunReport, summarize
from whet.report.watch.listing import RunListing
from whet.report.watch.status_reader import RunStamp, file_stamp, hide_path
from whet.run import strict_json
from whet.run.folder import CHECKPOINTS, RUN_PARTS, open_run
from whet.run.follow import LiveHistory
from whet.run.lock import is_locked
from whet.web.access import HttpError

_MAX_RUNS = 16
# Minimum interval between scans for a run that is not in the list.
_SCAN_SECONDS = 1.0
# Maximum blocks (of 256 events) of all open runs together. A run of 5 million events has half as many.
_MAX_BLOCKS = 40_000
# Maximum share of a core for rendering one run.
_MAX_CORE_SHARE = 0.03
# Maximum share of wall time, which includes waiting, so that a slow disk is not kept busy.
_MAX_WALL_SHARE = 0.2
_MAX_PAUSE_SECONDS = 30.0


class WorkTimer:
    """Measures the CPU time of this thread, and computes the pause that limits its share of a core.

    During a training run, most of the wall time is spent waiting for a core, so wall time has a separate limit.
    """

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._begun_cpu = time.thread_time()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def pause(self, *, share: float) -> float:
        """Return how many seconds to pause, so that at most this share of a core is used."""
        cpu = time.thread_time() - self._begun_cpu
        return min(max(cpu / share, self.seconds / _MAX_WALL_SHARE), _MAX_PAUSE_SECONDS)


@dataclass(frozen=True, slots=True)
class RenderedRun:
    """The rendered report of a run, with the version that it was rendered from."""

    version: str
    report: RunReport
    body: bytes


class CachedRun:
    """An open run in the cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.history: LiveHistory | None = None
        self.lock = threading.Lock()
        self.rendered: RenderedRun | None = None
        self.paused_until = 0.0

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the index, as a measure of memory."""
        return 0 if self.history is None else len(self.history.layout.blocks)

    def refresh(self) -> LiveHistory:
        """Open the run, or read its new events if it is already open."""
        if self.history is None:
            self.history = LiveHistory(self.folder)
        else:
            self.history.refresh()
        return self.history


class RunCache:
    """Renders runs by their ids. It is thread-safe."""

    def __init__(self, listing: RunListing) -> None:
        self._listing = listing
        self._runs: OrderedDict[str, CachedRun] = OrderedDict()
        self._table_lock = threading.Lock()
        self._salt = secrets.token_bytes(8)

    def folder(self, run: str) -> Path:
        """Return the folder of a run by its id. Raise HttpError 404 if there is none."""
        folder = self._listing.folder(run)
        is_outdated = time.monotonic() - self._listing.scanned_at > _SCAN_SECONDS
        if (folder is None or not folder.is_dir()) and is_outdated:
            self._listing.scan()
            folder = self._listing.folder(run)
        if folder is None:
            raise HttpError(404, "no such run", got=run, try_="/api/runs")
        return folder

    def version(self, run: str) -> str:
        """Return a version that changes whenever the run may have changed. This costs a few stat calls."""
        folder = self.folder(run)
        try:
            entries, is_running = folder.stat().st_mtime_ns, is_locked(folder)
        except (WhetError, OSError):
            entries, is_running = 0, False
        # Stat these files too: a copied file appears before its content, and checkpoints change without an event.
        parts = [file_stamp(f"{folder}/{name}") for name in (*(f"{part}.json" for part in RUN_PARTS), CHECKPOINTS)]
        state = repr((run, RunStamp.of(folder), parts, entries, is_running)).encode()
        return hashlib.sha256(self._salt + state).hexdigest()[:20]

    def render(self, run: str) -> RenderedRun:
        """Return the rendered report of a run. It may be some seconds old if rendering is slow."""
        with self._opened(run) as cached:
            if cached.rendered is not None and time.monotonic() < cached.paused_until:
                return cached.rendered
            version, timer = self.version(run), WorkTimer()
            if cached.rendered is None or cached.rendered.version != version:
                report = summarize(open_run(cached.folder), history=cached.refresh()).for_page()
                body = strict_json.encode_compact(shorten(report.as_json())).encode()
                cached.rendered = RenderedRun(version, report, body)
                cached.paused_until = time.monotonic() + timer.pause(share=_MAX_CORE_SHARE)
            return cached.rendered

    def compare(self, runs: list[str], *, known: str | None) -> tuple[str, bytes]:
        """Return the version of a comparison of several runs, and its JSON (empty if the client already has it)."""
        if not 2 <= len(runs) <= MAX_COMPARED_RUNS:
            raise HttpError(
                400, f"a comparison needs 2 to {MAX_COMPARED_RUNS} runs", got=len(runs), try_="/api/compare?ids=A,B"
            )
        rendered = [self.render(run) for run in runs]
        version = "-".join(one.version for one in rendered)
        if version == known:
            return version, b""
        comparison = compare_runs([one.report for one in rendered])
        return version, strict_json.encode_compact(shorten(comparison.as_json())).encode()

    @contextlib.contextmanager
    def history(self, run: str) -> Iterator[LiveHistory]:
        """Yield the current history of a run, with exclusive access inside the `with` block."""
        with self._opened(run) as cached:
            yield cached.refresh()

    @contextlib.contextmanager
    def _opened(self, run: str) -> Iterator[CachedRun]:
        folder = self.folder(run)
        # The guard protects only the table. Each run has its own lock, so that a slow run does not block the others.
        with self._table_lock:
            cached = self._runs.get(run) or CachedRun(folder)
            self._runs[run] = cached
            self._runs.move_to_end(run)
        try:
            with cached.lock:
                yield cached
        except HttpError:
            raise
        except (WhetError, OSError) as error:
            self._runs.pop(run, None)
            what, got = (error.what, error.got) if isinstance(error, WhetError) else ("cannot read the run", str(error))
            raise HttpError(409, hide_path(what, folder), got=hide_path(got or "", folder)) from None
        self._evict()

    def _evict(self) -> None:
        """Drop the least recently used runs until the others are within the limits."""
        with self._table_lock:
            while len(self._runs) > 1 and (
                len(self._runs) > _MAX_RUNS or sum(run.num_blocks for run in self._runs.values()) > _MAX_BLOCKS
            ):
                self._runs.popitem(last=False)
