"""How is a link opened without showing it to others? The arguments of a program are seen by every user of a machine, so
the browser gets the name of a file that only its owner can read, and that sends it on."""

import contextlib
import html
import secrets
import webbrowser
from collections.abc import Iterator
from pathlib import Path

from whet.web.running import private_folder, write_private


@contextlib.contextmanager
def page_that_opens(link: str) -> Iterator[Path]:
    """A file that leads to the link, as long as it is needed."""
    path = private_folder() / f"open-{secrets.token_hex(8)}.html"
    target = html.escape(link, quote=True)
    page = (
        f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url={target}"><title>whet</title>'
    )
    write_private(path, f'{page}<p><a href="{target}">Open</a>\n')
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def open_page(path: Path) -> bool:
    """Shows a file in the user's browser, where there is one."""
    try:
        return webbrowser.open(path.as_uri())
    except (webbrowser.Error, OSError):
        return False
