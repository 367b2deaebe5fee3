"""A live view of runs in a terminal: redrawn once a second in the alternate screen, until a key says enough."""

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live

from whet.cli import console
from whet.report.watch.terminal import MIN_HEIGHT, MIN_WIDTH, BoardReader, TerminalArea, board_rows, render_board

_LOOK_SECONDS = 1.0
_KEY_SECONDS = 0.2
_LEAVE = (b"q", b"Q", b"\x03", b"\x04")
_MOVES = {b"\x1b[A": -1, b"\x1bOA": -1, b"k": -1, b"\x1b[B": 1, b"\x1bOB": 1, b"j": 1, b"\x1b[5~": -10, b"\x1b[6~": 10}
_ROWS_ON_PAPER = 20


def watch_in_terminal(folder: Path, *, once: bool = False) -> None:
    """Shows the runs of a folder until q or Ctrl-C; where there is no terminal, or `once`, as plain lines once."""
    lookout = BoardReader(folder)
    terminal = Console()
    if once or not terminal.is_terminal or terminal.is_dumb_terminal:
        paper = TerminalArea(width=console.width(), height=None, unicode=console.supports_unicode())
        board = lookout.read(rows=_ROWS_ON_PAPER)
        console.result("\n".join(line.plain.rstrip() for line in render_board(board, paper)))
        return
    # The training beside it comes first.
    with contextlib.suppress(OSError):
        os.nice(10)
    _Screen(lookout, terminal).show()


class _Screen:
    """The alternate screen and the keys."""

    def __init__(self, lookout: BoardReader, console: Console) -> None:
        self._lookout = lookout
        self._console = console
        self._is_asked_to_rest = self._is_asked_to_leave = False
        self._live = Live(
            console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )

    def show(self) -> None:
        """Until a key or a signal says enough."""
        with _asked_by(self._leave, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            while True:
                with _asked_by(self._rest, signal.SIGTSTP), self._live, _single_keys():
                    self._watch()
                if self._is_asked_to_leave:
                    return
                # Ctrl-Z: the shell gets its own screen back, and `fg` draws ours anew.
                self._is_asked_to_rest = False
                os.kill(os.getpid(), signal.SIGTSTP)

    # Signals only ask: one that raised while the screen is being entered would leave it entered.
    def _rest(self, _number: int, _frame: FrameType | None) -> None:
        self._is_asked_to_rest = True

    def _leave(self, _number: int, _frame: FrameType | None) -> None:
        self._is_asked_to_leave = True

    def _watch(self) -> None:
        looked, size, move = -_LOOK_SECONDS, _size(), 0
        while not (self._is_asked_to_rest or self._is_asked_to_leave):
            if move or size != _size() or time.monotonic() - looked >= _LOOK_SECONDS:
                size, looked = _size(), time.monotonic()
                self._console.size = ConsoleDimensions(*size)
                self._draw(*size, move)
            move = 0
            for key in _keys():
                self._is_asked_to_leave |= key in _LEAVE
                move += _MOVES.get(key, 0)

    def _draw(self, width: int, height: int, move: int) -> None:
        paper = TerminalArea(
            width=max(width, MIN_WIDTH), height=max(height, MIN_HEIGHT), unicode=console.supports_unicode()
        )
        board = self._lookout.read(rows=board_rows(height), move=move)
        self._live.update(Group(*render_board(board, paper, has_keys=sys.stdin.isatty())), refresh=True)


def _size() -> tuple[int, int]:
    """Columns and rows of the terminal as it is now, whatever COLUMNS and LINES said when we began."""
    found = os.get_terminal_size(sys.stdout.fileno())
    return found.columns, found.lines


def _keys() -> list[bytes]:
    """What was typed in the next moment: single characters, and arrows as they are sent."""
    if not sys.stdin.isatty():
        time.sleep(_KEY_SECONDS)
        return []
    ready, _, _ = select.select([sys.stdin], [], [], _KEY_SECONDS)
    if not ready:
        return []
    data = os.read(sys.stdin.fileno(), 1024)
    if not data:
        return [b"q"]  # The terminal has gone.
    keys: list[bytes] = []
    while data:
        arrow = next((move for move in _MOVES if data.startswith(move)), data[:1])
        keys.append(arrow)
        data = data[len(arrow) :]
    return keys


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Keys come one by one and are not shown; the terminal is as before afterwards."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _asked_by(handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    """Meanwhile these signals are handled so; a closed window and SIGTERM put the terminal back as a key does."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)
