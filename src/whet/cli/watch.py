"""`whet watch`: watch runs while they train, in the browser or in the terminal."""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whet.cli import output
from whet.cli.options import JsonLine, NoBrowser, Port

if TYPE_CHECKING:
    from whet.web.registry import RunningServer

_REFRESH_SECONDS = 1.0
_MAX_PLAIN_ROWS = 20


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

    Shows curves, plan, events, memory, temperature and comparisons. It only reads run folders, so it cannot slow down
    or stop a training run. Ctrl-C stops it.
    """
    if terminal or once:
        _watch_in_terminal(folder, once=once)
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
    """Open the page of a running server. Keep the redirect file until the browser has probably read it."""
    from whet.web.registry import open_in_browser, redirect_page

    with redirect_page(running.link()) as page:
        if open_in_browser(page):
            time.sleep(5)


def _watch_in_terminal(folder: Path, *, once: bool = False) -> None:
    """Show the runs of a folder until Ctrl-C. With `once`, or without a terminal, print plain lines once."""
    from rich.console import Console, ConsoleDimensions, Group
    from rich.live import Live

    from whet.base.process import handle_signals
    from whet.report.watch.terminal import MIN_HEIGHT, MIN_WIDTH, BoardReader, TerminalArea, board_rows, render_board

    reader = BoardReader(folder)
    console = Console()
    if once or not console.is_terminal or console.is_dumb_terminal:
        area = TerminalArea(width=output.width(), height=None, unicode=output.supports_unicode())
        board = reader.read(rows=_MAX_PLAIN_ROWS)
        output.result("\n".join(line.plain.rstrip() for line in render_board(board, area)))
        return
    # Use a lower priority than the training run.
    with contextlib.suppress(OSError):
        os.nice(10)
    stop = threading.Event()
    live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    # The handler only sets a flag, because an exception raised while entering the alternate screen would leave the
    # terminal in it. Ctrl-Z is ignored, because it would leave the shell in the alternate screen.
    with (
        handle_signals(lambda *_: stop.set(), signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
        handle_signals(lambda *_: None, signal.SIGTSTP),
        live,
    ):
        while not stop.is_set():
            # rich prefers COLUMNS and LINES, which may be outdated.
            width, height = os.get_terminal_size(sys.stdout.fileno())
            console.size = ConsoleDimensions(width, height)
            area = TerminalArea(
                width=max(width, MIN_WIDTH), height=max(height, MIN_HEIGHT), unicode=output.supports_unicode()
            )
            live.update(Group(*render_board(reader.read(rows=board_rows(height)), area)), refresh=True)
            stop.wait(_REFRESH_SECONDS)
