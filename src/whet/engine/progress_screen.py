"""Where does the line of a run appear? Redrawn on a terminal, one display in a notebook, plain lines elsewhere."""

import shutil
import sys
import time
from collections import deque
from html import escape
from typing import Any, Protocol, TextIO

from whet.base.units import printable


class Screen(Protocol):
    """One place that shows how a run is going."""

    redraw_seconds: float
    """The line is drawn no more often."""
    hint: str
    """What the reader can do here."""

    def draw(self, line: str, *, share: float | None) -> None:
        """Shows how far the run has come, `share` of all; the next time replaces it."""

    def say(self, line: str) -> None:
        """A line that stays."""

    def close(self) -> None:
        """Takes the drawn line away, and shows all that was said."""


def open_screen(stream: TextIO | None, fallback: TextIO) -> Screen:
    """The screen of this process; of `stream` if one is given."""
    if stream is None and (shell := _notebook_shell()) is not None:
        return NotebookScreen(shell)
    chosen = stream or fallback
    return TerminalScreen(chosen) if chosen.isatty() else PlainScreen(chosen)


class PlainScreen:
    """A file or a pipe."""

    redraw_seconds = 10.0
    hint = ""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def draw(self, line: str, *, share: float | None) -> None:  # noqa: ARG002
        self.say(line)

    def say(self, line: str) -> None:
        self._stream.write(printable(line) + "\n")
        self._stream.flush()

    def close(self) -> None:
        pass


class TerminalScreen:
    """A terminal: the line is drawn over the one before."""

    redraw_seconds = 0.1
    hint = "^C saves and stops"

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_open = False

    def draw(self, line: str, *, share: float | None) -> None:  # noqa: ARG002
        columns = shutil.get_terminal_size((120, 40)).columns
        self._stream.write(f"\r\x1b[2K{printable(line)[: columns - 1]}")
        self._stream.flush()
        self._is_open = True

    def say(self, line: str) -> None:
        self.close()
        self._stream.write(printable(line) + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._is_open:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
            self._is_open = False


class NotebookScreen:
    """A notebook: one display that is updated, however long the run is."""

    redraw_seconds = 0.5
    hint = "interrupt the kernel to save and stop"
    _most_lines = 12

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._lines: deque[str] = deque(maxlen=self._most_lines)
        self._left_out = 0
        self._line = ""
        self._share: float | None = None
        self._id: str | None = None
        self._updated_at = 0.0
        self._is_closed = False

    def draw(self, line: str, *, share: float | None) -> None:
        self._line, self._share, self._is_closed = printable(line), share, False
        self._update()

    def say(self, line: str) -> None:
        for part in printable(line).split("\n"):
            self._left_out += len(self._lines) == self._most_lines
            self._lines.append(part)
        # Many lines in one second are one message to the browser; the next drawing or the end brings the rest.
        if self._is_closed or time.monotonic() - self._updated_at > self.redraw_seconds:
            self._update()

    def close(self) -> None:
        self._is_closed, self._line, self._share = True, "", None
        if self._id is not None or self._lines:
            self._update()

    def _update(self) -> None:
        self._updated_at = time.monotonic()
        lines = [f"({self._left_out:,} lines before)"] if self._left_out else []
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


def _notebook_shell() -> Any:
    """The shell of the notebook that runs us; None elsewhere. IPython is not loaded for it: it is there already."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return shell if hasattr(shell, "kernel") else None
