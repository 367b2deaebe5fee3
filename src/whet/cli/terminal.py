"""Live view of runs in the terminal (`whet watch --terminal`), redrawn once a second in the alternate screen."""

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live

from whet.base.process import handle_signals
from whet.cli import output
from whet.report.watch.terminal import MIN_HEIGHT, MIN_WIDTH, BoardReader, TerminalArea, board_rows, render_board

_REFRESH_SECONDS = 1.0
_MAX_PLAIN_ROWS = 20


def watch_in_terminal(folder: Path, *, once: bool = False) -> None:
    """Show the runs of a folder until Ctrl-C; without a terminal, or with `once`, print plain lines once."""
    reader = BoardReader(folder)
    console = Console()
    if once or not console.is_terminal or console.is_dumb_terminal:
        area = TerminalArea(width=output.width(), height=None, unicode=output.supports_unicode())
        board = reader.read(rows=_MAX_PLAIN_ROWS)
        output.result("\n".join(line.plain.rstrip() for line in render_board(board, area)))
        return
    # Leave the CPU to the training.
    with contextlib.suppress(OSError):
        os.nice(10)
    stop = threading.Event()
    live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    # The handler only sets a flag: an exception raised while entering the alternate screen would leave the terminal in
    # it. Ctrl-Z is ignored, because the shell would get the alternate screen.
    with (
        handle_signals(lambda *_: stop.set(), signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
        handle_signals(lambda *_: None, signal.SIGTSTP),
        live,
    ):
        while not stop.is_set():
            # COLUMNS and LINES, which rich prefers, may be outdated.
            width, height = os.get_terminal_size(sys.stdout.fileno())
            console.size = ConsoleDimensions(width, height)
            area = TerminalArea(
                width=max(width, MIN_WIDTH), height=max(height, MIN_HEIGHT), unicode=output.supports_unicode()
            )
            live.update(Group(*render_board(reader.read(rows=board_rows(height)), area)), refresh=True)
            stop.wait(_REFRESH_SECONDS)
