"""WHET_HOME of a test: empty, but for the texts that whet takes from installed libraries."""

import hashlib
from functools import cache
from pathlib import Path

from paths import ROOT


def new_home(folder: Path) -> Path:
    """Make a home that shares the embedded texts with those of other tests: reading them takes 5 s of CPU."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "text").is_symlink():
        (folder / "text").symlink_to(_shared_texts())
    return folder


@cache
def _shared_texts() -> Path:
    # whet's own cache does not notice a change of the code that fills it.
    source = (ROOT / "src" / "whet" / "recipes" / "text" / "embedded.py").read_bytes()
    folder = ROOT / ".pytest_cache" / "d" / f"texts-{hashlib.sha256(source).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
