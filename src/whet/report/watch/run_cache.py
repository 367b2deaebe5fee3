"""Runs that pages look at, kept open and rendered again only when they change."""

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
from whet.report.run_view import RunView, run_view
from whet.report.watch.listing import RunListing
from whet.report.watch.status_reader import RunStamp, file_stamp, hide_path
from whet.run import strict_json
from whet.run.folder import CHECKPOINTS, RUN_PARTS, open_run
from whet.run.follow import LiveHistory
from whet.run.lock import is_locked
from whet.web.access import HttpError

WAIT_SECONDS = 2.0
"""So long requests wait after the first; most runs are open by then. Later ones would only keep others waiting."""
ACCEPTED = 202
"""Not a failure: whoever asks again later gets the run."""
_OPEN_LOCK = threading.Lock()


class RunOpener:
    """A run that is being opened, or was."""

    def __init__(self, folder: Path) -> None:
        self.history: LiveHistory | None = None
        self._percent = 0
        self._folder = folder
        self._error: Exception | None = None
        self._is_cancelled = False
        self._done = threading.Event()
        self._patient_until = time.monotonic() + WAIT_SECONDS
        # Nobody waits for it when the server ends.
        threading.Thread(target=self._open, name="opener", daemon=True).start()

    def wait(self) -> LiveHistory:
        """The history, if it does not take too long; then a refusal that tells how far it is."""
        if not self._done.wait(max(0.0, self._patient_until - time.monotonic())):
            told = f"the log of this run is read for the first time: {self._percent} %"
            raise HttpError(ACCEPTED, told, try_="again in a second")
        if self._error is not None:
            raise self._error
        assert self.history is not None
        return self.history

    def cancel(self) -> None:
        """Nobody asks for it any more."""
        self._is_cancelled = True

    def _open(self) -> None:
        try:
            with _OPEN_LOCK:
                self.history = LiveHistory(self._folder, progress=self._tell)
        except Exception as error:
            self._error = error
        finally:
            self._done.set()

    def _tell(self, done: int, total: int) -> None:
        if self._is_cancelled:
            raise InterruptedError("nobody asks for this run any more")
        self._percent = 100 * done // max(1, total)


_MAX_WALL_SHARE = 0.2
"""With all waiting at most: a slow disk is not to be kept busy."""
_MAX_PAUSE_SECONDS = 30.0
"""Seconds: one slow moment leaves no page behind for longer."""


class WorkTimer:
    """Some work of this thread, from now on."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._begun_core = time.thread_time()

    @property
    def seconds(self) -> float:
        """How long it took so far, with all waiting."""
        return time.monotonic() - self._begun

    def rest(self, *, share: float) -> float:
        """Seconds to rest after it, so that at most this share of a core is taken."""
        core = time.thread_time() - self._begun_core
        return min(max(core / share, self.seconds / _MAX_WALL_SHARE), _MAX_PAUSE_SECONDS)


_MAX_RUNS = 16
_MAX_BLOCKS = 40_000
"""Of 256 events each, over all runs that are kept open: a run of 5 million events has half of them."""
_MAX_CORE_SHARE = 0.03
"""Of a core at most is spent on one run."""


@dataclass(frozen=True, slots=True)
class RenderedRun:
    """A run as it was at a moment."""

    version: str
    view: RunView
    body: bytes


class CachedRun:
    """A run that is kept open."""

    def __init__(self, folder: Path) -> None:
        self.opening = RunOpener(folder)
        self.turn = threading.Lock()
        self.seen: RenderedRun | None = None
        self.rests_until = 0.0

    @property
    def num_blocks(self) -> int:
        """How much memory it takes."""
        history = self.opening.history
        return 0 if history is None else len(history.layout.blocks)


class RunCache:
    """Opens runs by their ids; several threads may ask."""

    def __init__(self, listing: RunListing) -> None:
        self._listing = listing
        self._looks: OrderedDict[str, CachedRun] = OrderedDict()
        self._guard = threading.Lock()
        self._salt = secrets.token_bytes(8)

    def folder(self, ident: str) -> Path:
        """Where the run lies."""
        folder = self._listing.folder(ident)
        if folder is None and not self._listing.looked_at:
            self._listing.look()
            folder = self._listing.folder(ident)
        if folder is None:
            raise HttpError(404, "no such run", got=ident, try_="/api/runs")
        return folder

    def version(self, ident: str) -> str:
        """Another one whenever there may be something else to see; costs a few stats."""
        folder = self.folder(ident)
        try:
            entries, is_running = folder.stat().st_mtime_ns, is_locked(folder)
        except (WhetError, OSError):
            entries, is_running = 0, False
        # What is copied here comes into a file after its name is there, and checkpoints come and go without a word.
        parts = [file_stamp(f"{folder}/{name}") for name in (*(f"{part}.json" for part in RUN_PARTS), CHECKPOINTS)]
        known = repr((ident, RunStamp.of(folder), parts, entries, is_running)).encode()
        return hashlib.sha256(self._salt + known).hexdigest()[:20]

    def view(self, ident: str) -> RenderedRun:
        """The run as it is now."""
        folder = self.folder(ident)
        with self._opened(ident) as (look, history):
            version, work = self.version(ident), WorkTimer()
            if look.seen is None or look.seen.version != version:
                history.refresh()
                view = run_view(open_run(folder), history=history)
                look.seen = RenderedRun(version, view, strict_json.encode_compact(shorten(view.as_json())).encode())
                look.rests_until = time.monotonic() + work.rest(share=_MAX_CORE_SHARE)
            return look.seen

    def comparison(self, idents: list[str]) -> bytes:
        """Several runs side by side."""
        if not 2 <= len(idents) <= MAX_COMPARED_RUNS:
            raise HttpError(400, f"two to {MAX_COMPARED_RUNS} runs are compared", got=len(idents), try_="ids=A,B")
        compared = compare_runs([self.view(ident).view for ident in idents])
        return strict_json.encode_compact(shorten(compared.as_json())).encode()

    def is_at_rest(self, ident: str) -> bool:
        """Whether nobody should be told yet to look again."""
        look = self._looks.get(ident)
        return look is not None and look.rests_until > time.monotonic()

    @contextlib.contextmanager
    def history(self, ident: str) -> Iterator[LiveHistory]:
        """The events of a run as of now; for this thread alone as long as it reads."""
        with self._opened(ident) as (_, history):
            history.refresh()
            yield history

    def close(self) -> None:
        """Ends what is still being opened."""
        for look in list(self._looks.values()):
            look.opening.cancel()

    @contextlib.contextmanager
    def _opened(self, ident: str) -> Iterator[tuple[CachedRun, LiveHistory]]:
        folder = self.folder(ident)
        with self._guard:
            look = self._looks.get(ident) or CachedRun(folder)
            self._looks[ident] = look
            self._looks.move_to_end(ident)
        try:
            with look.turn:
                yield look, look.opening.wait()
        except HttpError:
            raise
        except (WhetError, OSError) as error:
            self._looks.pop(ident, None)
            what, got = (error.what, error.got) if isinstance(error, WhetError) else ("cannot read the run", str(error))
            told = HttpError(409, hide_path(what, folder), got=hide_path(got or "", folder))
            raise told from None
        self._forget_some()

    def _forget_some(self) -> None:
        """Keeps the runs that were looked at last, as far as they fit into memory."""
        with self._guard:
            while len(self._looks) > 1 and (
                len(self._looks) > _MAX_RUNS or sum(look.num_blocks for look in self._looks.values()) > _MAX_BLOCKS
            ):
                _, look = self._looks.popitem(last=False)
                look.opening.cancel()
