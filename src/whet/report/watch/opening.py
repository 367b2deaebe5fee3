"""How is a run opened that takes a minute to read? In a thread of its own, while others are told how far it is."""

import threading
import time
from pathlib import Path

from whet.run.live import LiveHistory
from whet.web.refusal import RefusedError

PATIENCE_SECONDS = 2.0
"""So long requests wait after the first; most runs are open by then. Later ones would only keep others waiting."""
ACCEPTED = 202
"""Not a failure: whoever asks again later gets the run."""
_ONE_AT_A_TIME = threading.Lock()


class Opening:
    """A run that is being opened, or was."""

    def __init__(self, folder: Path) -> None:
        self.history: LiveHistory | None = None
        self._percent = 0
        self._folder = folder
        self._error: Exception | None = None
        self._is_cancelled = False
        self._done = threading.Event()
        self._patient_until = time.monotonic() + PATIENCE_SECONDS
        # Nobody waits for it when the server ends.
        threading.Thread(target=self._open, name="opener", daemon=True).start()

    def wait(self) -> LiveHistory:
        """The history, if it does not take too long; then a refusal that tells how far it is."""
        if not self._done.wait(max(0.0, self._patient_until - time.monotonic())):
            told = f"the log of this run is read for the first time: {self._percent} %"
            raise RefusedError(ACCEPTED, told, try_="again in a second")
        if self._error is not None:
            raise self._error
        assert self.history is not None
        return self.history

    def cancel(self) -> None:
        """Nobody asks for it any more."""
        self._is_cancelled = True

    def _open(self) -> None:
        try:
            with _ONE_AT_A_TIME:
                self.history = LiveHistory(self._folder, progress=self._tell)
        except Exception as error:
            self._error = error
        finally:
            self._done.set()

    def _tell(self, done: int, total: int) -> None:
        if self._is_cancelled:
            raise InterruptedError("nobody asks for this run any more")
        self._percent = 100 * done // max(1, total)
