"""Cache of tuning results, keyed by machine, software, model and data."""

import hashlib
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.autotune.result import TuningResult
from whet.base.env import home
from whet.base.errors import WhetError
from whet.base.model import FrozenModel
from whet.run import durable
from whet.run.disk import read_regular_file

FORMAT_VERSION = 1
_MOST_DAYS = 90
_MOST_FILES = 200
_NAME = re.compile(r"[0-9a-f]{64}\.json")
"""Files of other names are not ours, and stay."""


class _CacheEntry(FrozenModel):
    format_version: int
    about: Mapping[str, Any]
    saved: float
    """Seconds since 1970."""
    found: TuningResult


def folder() -> Path:
    """Where evidence lies, unless a caller names another place."""
    return home() / "evidence"


def key(about: Mapping[str, Any]) -> str:
    """One name for one description, whatever the order of its keys."""
    return hashlib.sha256(_canonical(about).encode()).hexdigest()


def recall(about: Mapping[str, Any], *, where: Path | None = None, now: float | None = None) -> TuningResult | None:
    """What was found for exactly this; None where it never was, is too old, or cannot be read."""
    try:
        path = (where or folder()) / f"{key(about)}.json"
        entry = _CacheEntry.from_json(json.loads(read_regular_file(path)), where=path)
    except (OSError, ValueError, RuntimeError, WhetError):
        # A RuntimeError too: a user without a home folder, or JSON that is nested too deep.
        return None
    age = (time.time() if now is None else now) - entry.saved
    is_ours = entry.format_version == FORMAT_VERSION and _canonical(entry.about) == _canonical(about)
    return entry.found if is_ours and 0 <= age <= _MOST_DAYS * 86_400 else None


def remember(
    about: Mapping[str, Any], found: TuningResult, *, where: Path | None = None, now: float | None = None
) -> bool:
    """Keeps what was found; False where it tells of this hour only, or the folder cannot be written."""
    if not found.holds_another_day:
        return False
    saved = time.time() if now is None else now
    entry = _CacheEntry(format_version=FORMAT_VERSION, about=about, saved=saved, found=found)
    try:
        place = where or folder()
        durable.make_directory(place)
        path = place / f"{key(about)}.json"
        durable.write_file(path, data=json.dumps(entry.as_json(), allow_nan=False).encode())
        _tidy(place, now=saved, keep=path)
    except (OSError, RuntimeError, ValueError, WhetError):
        return False
    return True


def _tidy(place: Path, *, now: float, keep: Path) -> None:
    """Removes what is too old, and the oldest of too many; never what was written now, whatever the clock says."""
    others = (path for path in place.iterdir() if _NAME.fullmatch(path.name) and path != keep)
    ours = sorted(((path.lstat().st_mtime, path) for path in others), reverse=True)
    for number, (written, path) in enumerate(ours, start=1):
        if number >= _MOST_FILES or now - written > _MOST_DAYS * 86_400:
            path.unlink(missing_ok=True)


def _canonical(about: Mapping[str, Any]) -> str:
    return json.dumps(about, sort_keys=True, separators=(",", ":"), allow_nan=False)
