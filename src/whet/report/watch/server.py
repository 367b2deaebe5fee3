"""How does `whet watch` run? The routes of one folder behind the guard, with the lowest claim to the machine."""

from collections.abc import Callable
from pathlib import Path

from whet.base.errors import UsageError
from whet.report.watch.routes import Routes, lower_priority
from whet.web.limits import Limits
from whet.web.listening import LOOPBACK
from whet.web.running import Running, find_running
from whet.web.serving import require_libraries, serve

NAME = "watch"
PORT = 8321


def watch_runs(
    folder: Path,
    *,
    port: int = PORT,
    address: str = LOOPBACK,
    may_be_reached_by_others: bool = False,
    open_browser: bool = False,
    limits: Limits | None = None,
    on_ready: Callable[[Running], None] | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
) -> int:
    """Serves the live page of a folder of runs (or of one run) until a signal ends it; the exit code."""
    require_libraries()
    folder = watched_folder(folder)
    lower_priority()
    routes = Routes(folder)
    try:
        return serve(
            routes.routes(),
            name=NAME,
            about=str(folder),
            port=port,
            address=address,
            may_be_reached_by_others=may_be_reached_by_others,
            open_browser=open_browser,
            limits=limits,
            on_ready=on_ready,
            on_failure=on_failure,
        )
    finally:
        routes.close()


def running_already(folder: Path) -> Running | None:
    """The server that shows this folder now, if there is one."""
    return find_running(name=NAME, about=str(watched_folder(folder)))


def watched_folder(folder: Path) -> Path:
    """The folder in full; it need not be there yet."""
    folder = folder.expanduser().resolve()
    if folder.exists() and not folder.is_dir():
        raise UsageError("runs lie in a folder", got=str(folder), try_="whet watch DIR")
    return folder
