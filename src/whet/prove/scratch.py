"""Where do the lives of a proof write? In a folder that goes again, however the proof ends."""

import contextlib
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from whet.run import durable


@contextlib.contextmanager
def scratch_beside(path: Path) -> Iterator[Path]:
    """A folder on the disk of `path`, with a name that `whet runs --prune` knows; removed at the end.

    SIGTERM ends the proof as Ctrl-C does. What is to stay must be moved out of the folder.
    """
    made = durable.make_directory(path.parent)
    folder = durable.leftover_name(path)
    durable.make_directory(folder)
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        yield folder
    finally:
        signal.signal(signal.SIGTERM, before)
        for _ in range(3):
            # A life that was killed a moment ago may still have been writing.
            shutil.rmtree(folder, ignore_errors=True)
        durable.remove_empty(made)


def _stop(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
