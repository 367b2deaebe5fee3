"""Register and find the running servers of this user, and open them in the browser."""

import contextlib
import fcntl
import html
import json
import os
import secrets
import stat
import webbrowser
from collections.abc import Iterator
from pathlib import Path

from whet.base import env
from whet.base.errors import WhetError
from whet.base.model import FrozenModel
from whet.web.access import ServerKey


class RunningServer(FrozenModel):
    """A running server, its address and its key."""

    name: str
    """The kind of server, such as "watch"."""
    about: str
    """What the server shows, such as a folder."""
    host: str
    """Host name and port."""
    token: str
    pid: int
    view: str = ""
    """The fragment of the URL that a link opens, such as "#/run/ID"."""

    @property
    def url(self) -> str:
        """The address, without secrets."""
        return f"http://{self.host}/"

    def link(self) -> str:
        """Return a link that opens the server in a browser, and is valid once."""
        return f"{self.url}?token={ServerKey(self.token).ticket()}{self.view}"

    def __repr__(self) -> str:
        """Return a text without the token, because it may be logged."""
        return f"RunningServer({self.name} on {self.host})"

    __str__ = __repr__


@contextlib.contextmanager
def registered(*, name: str, about: str, host: str, key: ServerKey, view: str = "") -> Iterator[RunningServer]:
    """Register a running server inside the `with` block, so that other commands of this user can find it.

    Each server has a file that only its owner can read, and holds a lock on it, which the system releases when the
    process ends. Comparing the start times of processes would be less reliable, because on Linux they change when the
    clock is set.
    """
    running = RunningServer(name=name, about=about, host=host, token=key.token, pid=os.getpid(), view=view)
    path = private_folder() / f"{name}-{running.pid}-{secrets.token_hex(4)}.json"
    draft = path.with_suffix(".draft")
    write_private(draft, json.dumps(running.as_json()))
    with draft.open() as held:
        with contextlib.suppress(OSError):  # If the filesystem has no locks, the next command starts another server.
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.rename(path)
        try:
            yield running
        finally:
            path.unlink(missing_ok=True)


def find_server(*, name: str, about: str) -> RunningServer | None:
    """Return the running server with this name and subject, or None. Remove the files of killed servers."""
    for path in sorted(private_folder().glob(f"{name}-*.json")):
        running = _read(path)
        if running is None or not _is_locked(path):
            path.unlink(missing_ok=True)
        elif running.about == about:
            return running
    return None


def private_folder() -> Path:
    """Create the folder for server files, which only its owner can read, and return its path."""
    folder = env.home() / "servers"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise WhetError("this folder must belong to you", got=str(folder), try_="remove it, or set WHET_HOME")
        if stat.S_IMODE(status.st_mode) != 0o700:
            folder.chmod(0o700)
    except OSError as error:
        raise WhetError("cannot create the folder for running servers", got=str(error), try_="set WHET_HOME") from None
    return folder


def write_private(path: Path, text: str) -> None:
    """Create a file that only its owner can read, from the moment it exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _read(path: Path) -> RunningServer | None:
    try:
        return RunningServer.from_json(json.loads(path.read_text()), where=path)
    except (OSError, ValueError, WhetError):
        return None


def _is_locked(path: Path) -> bool:
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextlib.contextmanager
def redirect_page(link: str) -> Iterator[Path]:
    """Create a private HTML file that redirects to a link. Remove it at the end of the `with` block.

    All users of a machine can see the arguments of a program, so the browser is started with the name of this file
    instead of the link, which contains a ticket.
    """
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


def open_in_browser(path: Path) -> bool:
    """Open a file in the user's browser. Return whether this succeeded."""
    try:
        return webbrowser.open(path.as_uri())
    except (webbrowser.Error, OSError):
        return False
