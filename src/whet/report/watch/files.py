"""What is the page made of? A few files that come with whet, read once and served by their names alone."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "page" / "static"
PAGE = "watch.html"
ICON = "icon.svg"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page."""

    body: bytes
    kind: str
    tag: str
    """Another one for every other content."""


def page_files(folder: Path = FOLDER) -> dict[str, PageFile]:
    """All files of the page by name: what is not in here is not served, whatever lies on the disk."""
    found: dict[str, PageFile] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        kind = _KINDS.get(path.suffix)
        if kind is not None and path.is_file():
            body = path.read_bytes()
            found[path.name] = PageFile(body=body, kind=kind, tag=hashlib.sha256(body).hexdigest()[:20])
    return found
