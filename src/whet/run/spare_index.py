"""Where does a reader keep what it found out about a long run without an index? Under WHET_HOME, for the next time.

The index in a run folder belongs to the process that holds its lock. A spare one is believed as little: only as far as
the events still are what it says.
"""

import contextlib
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from whet.base.env import home
from whet.base.errors import WhetError
from whet.run import durable
from whet.run.index import HEADER, write_entry
from whet.run.tally import Block

_MOST_BYTES = 256 * 1024**2
"""Of all spare indexes together; the oldest go first."""
_NAME = re.compile(r"[0-9a-f]{64}\.index")
"""Files of other names are not ours, and stay."""


def spare_path(events: Path) -> Path | None:
    """Where the spare index of an events file lies or would lie; None for a user without a home folder."""
    with contextlib.suppress(OSError, RuntimeError):
        return home() / "indexes" / f"{hashlib.sha256(str(events.resolve()).encode()).hexdigest()}.index"
    return None


def keep_spare(events: Path, blocks: Iterable[Block]) -> None:
    """Keeps the blocks of an events file; where that cannot be, nobody minds."""
    path = spare_path(events)
    if path is None:
        return
    with contextlib.suppress(OSError, WhetError):
        durable.make_directory(path.parent)
        durable.write_file(path, data=b"".join([HEADER, *map(write_entry, blocks)]))
        _tidy(path.parent, keep=path)


def _tidy(folder: Path, *, keep: Path) -> None:
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path != keep]
    left = _MOST_BYTES - keep.stat().st_size
    for path in sorted(found, key=lambda path: path.lstat().st_mtime, reverse=True):
        left -= path.lstat().st_size
        if left < 0:
            path.unlink(missing_ok=True)
