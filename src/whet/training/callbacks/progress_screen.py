"""The outputs for the progress of a run: a terminal, a notebook, or a file.

In a terminal, a line is redrawn in place; in a notebook, a display is updated; a file or pipe gets plain lines.
"""

import shutil
import sys
import time
from collections import deque
from html import escape
from typing import Any, Protocol, TextIO

from whet.base.units import printable


class ProgressScreen(Protocol):
    """The interface of outputs for the progress of a run."""

    redraw_seconds: float
    """Minimum number of seconds between redraws."""
    hint: str
    """A hint for the user at the end of the line, for example how to stop."""
    is_lasting: bool
    """Whether drawn lines stay visible, as in a file. Each evaluation is then printed as a separate line."""

    @property
    def width(self) -> int:
        """The number of columns."""

    def draw(self, line: str, *, share: float | None) -> None:
        """Draw the progress line in place of the previous one. `share` is the completed fraction of the run."""

    def print_line(self, line: str) -> None:
        """Print a line that stays visible above the progress line."""

    def close(self) -> None:
        """Clear the progress line and show all messages."""


def open_screen(stream: TextIO | None, fallback: TextIO) -> ProgressScreen:
    """Return the screen for `stream`.

    Without a stream, return a notebook display, or else the screen for `fallback`.
    """
    if stream is None and (shell := notebook_shell()) is not None:
        return NotebookScreen(shell)
    chosen = stream or fallback
    return TerminalScreen(chosen) if chosen.isatty() else PlainScreen(chosen)


class PlainScreen:
    """A screen for a file or a pipe: every drawing is a new line."""

    redraw_seconds = 10.0
    hint = ""
    is_lasting = True
    width = 120

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def draw(self, line: str, *, share: float | None) -> None:  # noqa: ARG002
        self.print_line(line)

    def print_line(self, line: str) -> None:
        self._stream.write(printable(line) + "\n")
        self._stream.flush()

    def close(self) -> None:
        pass


class TerminalScreen:
    """A screen for a terminal: each drawing overwrites the previous line."""

    redraw_seconds = 0.1
    hint = "Ctrl-C saves and stops"
    is_lasting = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_open = False

    @property
    def width(self) -> int:
        # A line that fills the last column would wrap in some terminals.
        return shutil.get_terminal_size((120, 40)).columns - 1

    def draw(self, line: str, *, share: float | None) -> None:  # noqa: ARG002
        self._stream.write(f"\r\x1b[2K{printable(line)[: self.width]}")
        self._stream.flush()
        self._is_open = True

    def print_line(self, line: str) -> None:
        self.close()
        self._stream.write(printable(line) + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._is_open:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
            self._is_open = False


class NotebookScreen:
    """A screen for a notebook: a single display that is updated in place."""

    redraw_seconds = 0.5
    hint = "interrupt the kernel to save and stop"
    is_lasting = False
    width = 120
    _max_lines = 12

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._lines: deque[str] = deque(maxlen=self._max_lines)
        self._num_dropped = 0
        self._line = ""
        self._share: float | None = None
        self._id: str | None = None
        self._updated_at = 0.0
        self._is_closed = False

    def draw(self, line: str, *, share: float | None) -> None:
        self._line, self._share, self._is_closed = printable(line), share, False
        self._update()

    def print_line(self, line: str) -> None:
        for part in printable(line).split("\n"):
            self._num_dropped += len(self._lines) == self._max_lines
            self._lines.append(part)
        # Combine lines that follow each other quickly into one message to the browser. The next update shows the rest.
        if self._is_closed or time.monotonic() - self._updated_at > self.redraw_seconds:
            self._update()

    def close(self) -> None:
        self._is_closed, self._line, self._share = True, "", None
        if self._id is not None or self._lines:
            self._update()

    def _update(self) -> None:
        self._updated_at = time.monotonic()
        lines = [f"({self._num_dropped:,} earlier lines)"] if self._num_dropped else []
        lines += self._lines
        plain = "\n".join([*lines, self._line]).rstrip()
        bar = "" if self._share is None else f'<progress value="{self._share:.4f}" max="1"></progress> '
        drawn = f"{bar}<code>{escape(self._line)}</code>" if self._line else ""
        html = f'<pre style="margin:0">{escape(chr(10).join(lines))}</pre>{drawn}'
        is_new = self._id is None
        self._id = self._id or f"whet-{id(self):x}-{time.monotonic_ns():x}"
        self._shell.display_pub.publish(
            {"text/plain": plain, "text/html": html}, transient={"display_id": self._id}, update=not is_new
        )


def notebook_shell() -> Any:
    """Return the shell of the notebook that runs this process; None elsewhere. Does not import IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return shell if hasattr(shell, "kernel") else None


def is_notebook() -> bool:
    """Return whether this process executes the cells of a notebook."""
    return notebook_shell() is not None
