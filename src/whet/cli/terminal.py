"""Live view of runs in the terminal (`whet watch --terminal`), redrawn once a second in the alternate screen."""

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live

from whet.base.process import handle_signals
from whet.cli import output
from whet.report.watch.terminal import MIN_HEIGHT, MIN_WIDTH, BoardReader, TerminalArea, board_rows, render_board

_REFRESH_SECONDS = 1.0
_KEY_SECONDS = 0.2
_QUIT_KEYS = (b"q", b"Q", b"\x03", b"\x04")
_MOVES = {b"\x1b[A": -1, b"\x1bOA": -1, b"k": -1, b"\x1b[B": 1, b"\x1bOB": 1, b"j": 1, b"\x1b[5~": -10, b"\x1b[6~": 10}
_MAX_PLAIN_ROWS = 20


def watch_in_terminal(folder: Path, *, once: bool = False) -> None:
    """Show the runs of a folder until q or Ctrl-C; without a terminal, or with `once`, print plain lines once."""
    reader = BoardReader(folder)
    terminal = Console()
    if once or not terminal.is_terminal or terminal.is_dumb_terminal:
        paper = TerminalArea(width=output.width(), height=None, unicode=output.supports_unicode())
        board = reader.read(rows=_MAX_PLAIN_ROWS)
        output.result("\n".join(line.plain.rstrip() for line in render_board(board, paper)))
        return
    # Leave the CPU to the training.
    with contextlib.suppress(OSError):
        os.nice(10)
    _LiveView(reader, terminal).show()


class _LiveView:
    """Draws the board in the alternate screen and reads keys."""

    def __init__(self, reader: BoardReader, console: Console) -> None:
        self._reader = reader
        self._console = console
        self._is_suspend_requested = self._is_quit_requested = False
        self._live = Live(
            console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )

    def show(self) -> None:
        """Redraw until a key or a signal quits."""
        with handle_signals(self._request_quit, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            while True:
                with handle_signals(self._request_suspend, signal.SIGTSTP), self._live, _single_keys():
                    self._watch()
                if self._is_quit_requested:
                    return
                # Ctrl-Z: the shell gets its own screen back, and `fg` redraws ours.
                self._is_suspend_requested = False
                os.kill(os.getpid(), signal.SIGTSTP)

    # Handlers only set flags: an exception raised while entering the alternate screen would leave the terminal in it.
    def _request_suspend(self, _number: int, _frame: FrameType | None) -> None:
        self._is_suspend_requested = True

    def _request_quit(self, _number: int, _frame: FrameType | None) -> None:
        self._is_quit_requested = True

    def _watch(self) -> None:
        refreshed, size, move = -_REFRESH_SECONDS, _size(), 0
        while not (self._is_suspend_requested or self._is_quit_requested):
            if move or size != _size() or time.monotonic() - refreshed >= _REFRESH_SECONDS:
                size, refreshed = _size(), time.monotonic()
                self._console.size = ConsoleDimensions(*size)
                self._draw(*size, move)
            move = 0
            for key in _keys():
                self._is_quit_requested |= key in _QUIT_KEYS
                move += _MOVES.get(key, 0)

    def _draw(self, width: int, height: int, move: int) -> None:
        paper = TerminalArea(
            width=max(width, MIN_WIDTH), height=max(height, MIN_HEIGHT), unicode=output.supports_unicode()
        )
        board = self._reader.read(rows=board_rows(height), move=move)
        self._live.update(Group(*render_board(board, paper, has_keys=sys.stdin.isatty())), refresh=True)


def _size() -> tuple[int, int]:
    """Return the current columns and rows of the terminal; COLUMNS and LINES may be outdated."""
    size = os.get_terminal_size(sys.stdout.fileno())
    return size.columns, size.lines


def _keys() -> list[bytes]:
    """Return the keys typed within a moment: characters, and escape sequences of arrow keys."""
    if not sys.stdin.isatty():
        time.sleep(_KEY_SECONDS)
        return []
    ready, _, _ = select.select([sys.stdin], [], [], _KEY_SECONDS)
    if not ready:
        return []
    data = os.read(sys.stdin.fileno(), 1024)
    if not data:
        return [b"q"]  # The terminal was closed.
    keys: list[bytes] = []
    while data:
        arrow = next((move for move in _MOVES if data.startswith(move)), data[:1])
        keys.append(arrow)
        data = data[len(arrow) :]
    return keys


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Read keys without Enter and without echo; restore the terminal on exit."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
