"""On-disk cache of tuning results, keyed by machine, software, model and data."""

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
# Entries expire, because a machine can change in ways that the key does not cover.
_MAX_DAYS = 90
# An incomplete result expires sooner: the next search gets further in the same time, because part of the code is
# already compiled.
_MAX_INCOMPLETE_DAYS = 1
_MAX_FILES = 200
# Names of the files that the cache writes. It removes no other files from the folder.
_NAME = re.compile(r"[0-9a-f]{64}\.json")


class _CacheEntry(FrozenModel):
    format_version: int
    about: Mapping[str, Any]
    saved: float
    """Unix time in seconds when the entry was written."""
    result: TuningResult


def folder() -> Path:
    """Return the default cache folder."""
    return home() / "evidence"


def key(about: Mapping[str, Any]) -> str:
    """Return the cache key of a workload description. The order of fields does not matter."""
    return hashlib.sha256(_canonical(about).encode()).hexdigest()


def load(about: Mapping[str, Any], *, where: Path | None = None, now: float | None = None) -> TuningResult | None:
    """Return the cached result for a workload description, or None if it is missing, expired or unreadable."""
    try:
        path = (where or folder()) / f"{key(about)}.json"
        entry = _CacheEntry.from_json(json.loads(read_regular_file(path)), where=path)
    except (OSError, ValueError, RuntimeError, WhetError):
        # RuntimeError is raised if the user has no home folder, or if the JSON is nested too deeply.
        return None
    age = (time.time() if now is None else now) - entry.saved
    # Compare the descriptions too, because the file may have been renamed or edited.
    matches = entry.format_version == FORMAT_VERSION and _canonical(entry.about) == _canonical(about)
    max_days = _MAX_DAYS if entry.result.is_complete else _MAX_INCOMPLETE_DAYS
    return entry.result if matches and 0 <= age <= max_days * 86_400 else None


def save(
    about: Mapping[str, Any], result: TuningResult, *, where: Path | None = None, now: float | None = None
) -> bool:
    """Cache a result. Return False if it is not reusable or cannot be written."""
    if not result.is_reusable:
        return False
    saved = time.time() if now is None else now
    entry = _CacheEntry(format_version=FORMAT_VERSION, about=about, saved=saved, result=result)
    try:
        target = where or folder()
        durable.make_directory(target)
        path = target / f"{key(about)}.json"
        durable.write_file(path, data=json.dumps(entry.as_json(), allow_nan=False).encode())
        _remove_old(target, now=saved, keep=path)
    except (OSError, RuntimeError, ValueError, WhetError):
        # The cache is only an optimization, so a full or read-only disk must not stop the run.
        return False
    return True


def _remove_old(target: Path, *, now: float, keep: Path) -> None:
    """Remove expired entries, and the oldest entries beyond the limit.

    The new entry `keep` is never removed, even if the system clock is wrong.
    """
    others = (path for path in target.iterdir() if _NAME.fullmatch(path.name) and path != keep)
    newest_first = sorted(((path.lstat().st_mtime, path) for path in others), reverse=True)
    for number, (written, path) in enumerate(newest_first, start=1):
        if number >= _MAX_FILES or now - written > _MAX_DAYS * 86_400:
            path.unlink(missing_ok=True)


def _canonical(about: Mapping[str, Any]) -> str:
    return json.dumps(about, sort_keys=True, separators=(",", ":"), allow_nan=False)
