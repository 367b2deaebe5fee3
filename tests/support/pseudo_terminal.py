"""A command in a real pseudo-terminal: its screen, and keys typed into it."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_OURS = re.compile(r"\x1b\[(?:[0-9;]*m|H|2J|\?25[hl]|\?1049[hl])")
"""Sequences that a live view may send: colors, home, clear, cursor on and off, the alternate screen."""


class PseudoTerminal:
    """Runs a command in a terminal of a given size; `screen` is the last picture, without colors."""

    def __init__(
        self, command: Sequence[str], *, columns: int, rows: int, cwd: Path, env: dict[str, str] | None = None
    ) -> None:
        self._ours, self._theirs = pty.openpty()
        self.resize(columns, rows)
        self.modes = self.now()
        self._data = b""
        self._process = subprocess.Popen(
            command,
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            cwd=cwd,
            env=env or {**os.environ, "TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def now(self) -> list[object]:
        """The modes of the terminal: echo, lines or single keys."""
        return termios.tcgetattr(self._theirs)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    @property
    def sent(self) -> str:
        """All output so far."""
        while select.select([self._ours], [], [], 0)[0]:
            self._data += os.read(self._ours, 65536)
        return self._data.decode(errors="replace")

    @property
    def screen(self) -> list[str]:
        """The lines of the last complete picture."""
        pictures = self.sent.split("\x1b[H")
        picture = pictures[-1] if len(pictures) < 3 else max(pictures[-2:], key=lambda text: text.count("\n"))
        return [_OURS.sub("", line).rstrip() for line in picture.split("\r\n")]

    @property
    def steered(self) -> list[str]:
        """Control characters that a live view does not send."""
        return [char for char in _OURS.sub("", self.sent) if not char.isprintable() and char not in "\r\n"]

    def wait_for(self, is_seen: Callable[[str], bool], *, seconds: float = 120.0) -> str:
        """Wait until the screen shows a text and return it; fail with the actual screen."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            text = "\n".join(self.screen)
            if is_seen(text):
                return text
            time.sleep(0.05)
        raise AssertionError("not seen in time; the screen is\n" + "\n".join(self.screen))

    def end(self, *, seconds: float = 120.0) -> int:
        """The exit code of a process that ended by itself."""
        deadline = time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < deadline:
            _ = self.sent
            time.sleep(0.02)
        return self._process.wait(timeout=0.1)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._ours)
        os.close(self._theirs)
