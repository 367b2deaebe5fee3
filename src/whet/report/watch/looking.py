"""What does one run look like now? Its view as JSON, made again only when its folder has changed."""

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
from whet.report.comparing import MOST_RUNS, compare_view
from whet.report.view import RunView, run_view
from whet.report.watch.line import Mark, stamp, without_place
from whet.report.watch.listing import Listing
from whet.report.watch.opening import Opening
from whet.report.watch.pace import Work
from whet.report.watch.shorten import shorten
from whet.run import strict_json
from whet.run.folder import CHECKPOINTS, PARTS, open_run
from whet.run.live import LiveHistory
from whet.run.lock import is_locked
from whet.web.refusal import RefusedError

_KEPT_RUNS = 16
_KEPT_BLOCKS = 40_000
"""Of 256 events each, over all runs that are kept open: a run of 5 million events has half of them."""
_SHARE = 0.03
"""Of a core at most is spent on one run."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A run as it was at a moment."""

    version: str
    view: RunView
    body: bytes


class Look:
    """A run that is kept open."""

    def __init__(self, folder: Path) -> None:
        self.opening = Opening(folder)
        self.turn = threading.Lock()
        self.seen: Seen | None = None
        self.rests_until = 0.0

    @property
    def num_blocks(self) -> int:
        """How much memory it takes."""
        history = self.opening.history
        return 0 if history is None else len(history.layout.blocks)


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
        except (WhetError, OSError):
            entries, is_running = 0, False
        # What is copied here comes into a file after its name is there, and checkpoints come and go without a word.
        parts = [stamp(f"{folder}/{name}") for name in (*(f"{part}.json" for part in PARTS), CHECKPOINTS)]
        known = repr((ident, Mark.of(folder), parts, entries, is_running)).encode()
        return hashlib.sha256(self._salt + known).hexdigest()[:20]

    def view(self, ident: str) -> Seen:
        """The run as it is now."""
        folder = self.folder(ident)
        with self._opened(ident) as (look, history):
            version, work = self.version(ident), Work()
            if look.seen is None or look.seen.version != version:
                history.refresh()
                view = run_view(open_run(folder), history=history)
                look.seen = Seen(version, view, strict_json.compact(shorten(view.as_json())).encode())
                look.rests_until = time.monotonic() + work.rest(share=_SHARE)
            return look.seen

    def comparison(self, idents: list[str]) -> bytes:
        """Several runs side by side."""
        if not 2 <= len(idents) <= MOST_RUNS:
            raise RefusedError(400, f"two to {MOST_RUNS} runs are compared", got=len(idents), try_="ids=A,B")
        compared = compare_view([self.view(ident).view for ident in idents])
        return strict_json.compact(shorten(compared.as_json())).encode()

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
    def _opened(self, ident: str) -> Iterator[tuple[Look, LiveHistory]]:
        folder = self.folder(ident)
        with self._guard:
            look = self._looks.get(ident) or Look(folder)
            self._looks[ident] = look
            self._looks.move_to_end(ident)
        try:
            with look.turn:
                yield look, look.opening.wait()
        except RefusedError:
            raise
        except (WhetError, OSError) as error:
            self._looks.pop(ident, None)
            what, got = (error.what, error.got) if isinstance(error, WhetError) else ("cannot read the run", str(error))
            told = RefusedError(409, without_place(what, folder), got=without_place(got or "", folder))
            raise told from None
        self._forget_some()

    def _forget_some(self) -> None:
        """Keeps the runs that were looked at last, as far as they fit into memory."""
        with self._guard:
            while len(self._looks) > 1 and (
                len(self._looks) > _KEPT_RUNS or sum(look.num_blocks for look in self._looks.values()) > _KEPT_BLOCKS
            ):
                _, look = self._looks.popitem(last=False)
                look.opening.cancel()
