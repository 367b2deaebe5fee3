"""whet watch: look at runs while they train."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from whet.web.registry import RunningServer


def watch(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that holds the runs, or one run.")] = Path(
        "runs"
    ),
    port: Annotated[int, typer.Option(metavar="N", help="The first port to try; 0 takes any.")] = 8321,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the link.")] = False,
    address: Annotated[
        str, typer.Option(metavar="IP", help="Listen on another address: others can then reach it.")
    ] = "127.0.0.1",
    json: Annotated[bool, typer.Option("--json", help="Print address and link as one line of JSON.")] = False,
    terminal: Annotated[bool, typer.Option("--terminal", help="Show them here, in the terminal.")] = False,
    once: Annotated[bool, typer.Option("--once", help="With --terminal: print them once, as plain lines.")] = False,
) -> None:
    """Runs in your browser or terminal while they train: curves, plan, events, memory, heat, comparison.

    Reads run folders only; it can neither slow nor stop a training. Ctrl-C ends it.

    \b
    whet watch
    whet watch experiments --port 9000 --no-browser
    whet watch runs/text-001 --terminal
    """
    if terminal or once:
        from whet.cli.terminal import watch_in_terminal

        watch_in_terminal(folder, once=once)
        return
    from whet.cli import console
    from whet.report.watch.server import find_watch_server, resolve_watch_folder, watch_runs

    found = find_watch_server(folder)
    if found is not None:
        _tell(found, as_json=json, is_new=False)
        if not no_browser:
            _open(found)
        return
    if not resolve_watch_folder(folder).exists():
        console.note(f"{folder} is not there yet: runs are shown as they come")
    is_loopback = address in ("127.0.0.1", "::1", "localhost")
    if not is_loopback:
        console.note(f"WARNING: everybody who can reach {address} can knock at this server, and read along on the way:")
        console.note("the link is the only lock, and nothing is encrypted. `ssh -L 8321:127.0.0.1:8321 HOST` is safer.")
    code = watch_runs(
        folder,
        port=port,
        address="127.0.0.1" if is_loopback else address,
        allow_remote=not is_loopback,
        open_browser=not no_browser,
        on_ready=lambda running: _tell(running, as_json=json, is_new=True),
        on_failure=_failed,
    )
    raise typer.Exit(code)


def _tell(running: "RunningServer", *, as_json: bool, is_new: bool) -> None:
    import sys

    from whet.cli import console

    if as_json:
        console.line_json({"url": running.url, "link": running.link(), "pid": running.pid, "is_new": is_new})
    else:
        console.result(f"{running.link()}")
        console.note("opens once; whet watch again gives another link" + (", Ctrl-C ends it" if is_new else ""))
    sys.stdout.flush()


def _open(running: "RunningServer") -> None:
    """Shows a server that runs already; the file may go once the browser has read it, which we cannot see."""
    import time

    from whet.web.registry import open_in_browser, redirect_page

    with redirect_page(running.link()) as page:
        if open_in_browser(page):
            time.sleep(5)


def _failed(error: BaseException) -> None:
    import traceback

    from whet.cli import console

    shown = "".join(traceback.format_exception(error)) if console.debug else f"{type(error).__name__}: {error}"
    console.note(f"a request failed: {shown}")
