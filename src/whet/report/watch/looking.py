"""What does one run look like now? Its view as JSON, made again only when its folder has changed."""

import contextlib
import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from whet.base.errors import WhetError
from whet.report.comparing import MOST_RUNS, compare_view
from whet.report.view import RunView, run_view
from whet.report.watch.line import Mark, without_place
from whet.report.watch.listing import Listing
from whet.report.watch.shorten import shorten
from whet.run import strict_json
from whet.run.folder import open_run
from whet.run.live import LiveHistory
from whet.run.lock import is_locked
from whet.web.refusal import RefusedError

_KEPT_RUNS = 16
_KEPT_BLOCKS = 40_000
"""Of 256 events each, over all runs that are kept open: a run of 5 million events has half of them."""
_SHARE = 0.1
"""Of the time at most is spent on one run."""


@dataclass(slots=True)
class Look:
    """A run that is kept open, as it was when it was last looked at."""

    history: LiveHistory
    version: str = ""
    view: RunView | None = None
    body: bytes = b""
    made_at: float = 0.0
    cost_seconds: float = 0.0
    turn: threading.Lock = field(default_factory=threading.Lock)


class Looking:
    """Opens runs by their ids; several threads may ask."""

    def __init__(self, listing: Listing) -> None:
        self._listing = listing
        self._looks: OrderedDict[str, Look] = OrderedDict()
        self._guard = threading.Lock()
        self._salt = secrets.token_bytes(8)

    def folder(self, ident: str) -> Path:
        """Where the run lies."""
        folder = self._listing.folder(ident)
        if folder is None and not self._listing.looked_at:
            self._listing.look()
            folder = self._listing.folder(ident)
        if folder is None:
            raise RefusedError(404, "no such run", got=ident, try_="/api/runs")
        return folder

    def version(self, ident: str) -> str:
        """Another one whenever there may be something else to see; costs a few stats."""
        folder = self.folder(ident)
        try:
            entries, is_running = folder.stat().st_mtime_ns, is_locked(folder)
        except OSError:
            entries, is_running = 0, False
        known = repr((ident, Mark.of(folder), entries, is_running)).encode()
        return hashlib.sha256(self._salt + known).hexdigest()[:20]

    def view(self, ident: str) -> Look:
        """The run as it is now."""
        folder = self.folder(ident)
        with _told_without_place(folder):
            look = self._look(ident, folder)
            with look.turn:
                version = self.version(ident)
                if look.version != version:
                    begun = time.monotonic()
                    look.history.refresh()
                    look.view = run_view(open_run(folder), history=look.history)
                    look.body = strict_json.compact(shorten(look.view.as_json())).encode()
                    look.version, look.made_at, look.cost_seconds = version, begun, time.monotonic() - begun
        self._forget_some()
        return look

    def comparison(self, idents: list[str]) -> bytes:
        """Several runs side by side."""
        if not 2 <= len(idents) <= MOST_RUNS:
            raise RefusedError(400, f"two to {MOST_RUNS} runs are compared", got=len(idents), try_="ids=A,B")
        views = [view for ident in idents if (view := self.view(ident).view) is not None]
        return strict_json.compact(shorten(compare_view(views).as_json())).encode()

    def rest_seconds(self, ident: str) -> float:
        """How long nobody should be told to look again."""
        look = self._looks.get(ident)
        return 0.0 if look is None else look.made_at + look.cost_seconds / _SHARE - time.monotonic()

    def history(self, ident: str) -> LiveHistory:
        """The events of a run, as of now."""
        folder = self.folder(ident)
        with _told_without_place(folder):
            look = self._look(ident, folder)
            with look.turn:
                look.history.refresh()
        return look.history

    def _look(self, ident: str, folder: Path) -> Look:
        with self._guard:
            look = self._looks.get(ident)
            if look is not None:
                self._looks.move_to_end(ident)
                return look
        opened = Look(LiveHistory(folder))
        with self._guard:
            return self._looks.setdefault(ident, opened)

    def _forget_some(self) -> None:
        """Keeps the runs that were looked at last, as far as they fit into memory."""
        with self._guard:
            while len(self._looks) > 1 and (
                len(self._looks) > _KEPT_RUNS
                or sum(len(look.history.layout.blocks) for look in self._looks.values()) > _KEPT_BLOCKS
            ):
                self._looks.popitem(last=False)


@contextlib.contextmanager
def _told_without_place(folder: Path) -> Iterator[None]:
    try:
        yield
    except (WhetError, OSError) as error:
        if isinstance(error, RefusedError):
            raise
        what, got = (error.what, error.got) if isinstance(error, WhetError) else ("the run cannot be read", str(error))
        raise RefusedError(409, without_place(what, folder), got=without_place(got or "", folder)) from None
