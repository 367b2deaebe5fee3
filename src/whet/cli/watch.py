"""`whet watch`: watch runs while they train."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whet.cli import output
from whet.cli.options import JsonLine, NoBrowser, Port

if TYPE_CHECKING:
    from whet.web.registry import RunningServer


def watch(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder that contains the runs, or a single run.")
    ] = Path("runs"),
    port: Port = 8321,
    no_browser: NoBrowser = False,
    address: Annotated[
        str, typer.Option(metavar="IP", help="Listen on another address, which makes the page reachable for others.")
    ] = "127.0.0.1",
    json: JsonLine = False,
    terminal: Annotated[bool, typer.Option("--terminal", help="Show the runs in the terminal.")] = False,
    once: Annotated[bool, typer.Option("--once", help="With --terminal: print the runs once, as plain lines.")] = False,
) -> None:
    """Watch runs while they train, in the browser or terminal.

    \b
    whet watch
    whet watch experiments --port 9000 --no-browser
    whet watch runs/text-001 --terminal

    Shows curves, plan, events, memory, temperature and comparisons. Only reads run folders, so it can neither slow down
    nor stop a training. Ctrl-C stops it.
    """
    if terminal or once:
        from whet.cli.terminal import watch_in_terminal

        watch_in_terminal(folder, once=once)
        return
    from whet.report.watch.server import find_watch_server, resolve_watch_folder, watch_runs

    def print_link(running: "RunningServer", *, is_new: bool) -> None:
        note = "the link works once; whet watch prints another" + ("; Ctrl-C stops the server" if is_new else "")
        output.link(running, as_json=json, note_text=note, is_new=is_new)

    running = find_watch_server(folder)
    if running is not None:
        print_link(running, is_new=False)
        if not no_browser:
            _open(running)
        return
    if not resolve_watch_folder(folder).exists():
        output.note(f"{folder} does not exist yet: runs appear as they start")
    is_loopback = address in ("127.0.0.1", "::1", "localhost")
    if not is_loopback:
        output.note(f"WARNING: everyone who can reach {address} can connect to this server and read its traffic:")
        output.note("only the link protects it, and nothing is encrypted. `ssh -L 8321:127.0.0.1:8321 HOST` is safer.")
    code = watch_runs(
        folder,
        port=port,
        address="127.0.0.1" if is_loopback else address,
        allow_remote=not is_loopback,
        open_browser=not no_browser,
        on_ready=lambda running: print_link(running, is_new=True),
        on_failure=output.failed_request,
    )
    raise typer.Exit(code)


def _open(running: "RunningServer") -> None:
    """Open the page of a running server; keep the redirect file until the browser has probably read it."""
    import time

    from whet.web.registry import open_in_browser, redirect_page

    with redirect_page(running.link()) as page:
        if open_in_browser(page):
            time.sleep(5)
