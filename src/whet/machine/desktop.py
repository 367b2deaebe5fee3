"""Desktop integration: notifications, and keeping a Mac awake while it trains."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html import escape
from typing import TextIO

from whet.base import env
from whet.machine.programs import ProgramRunner, clean_name, run_program

_CAFFEINATE = "caffeinate"
NO_CAFFEINATE_MESSAGE = "no caffeinate here, so the machine may fall asleep while it trains"


@contextlib.contextmanager
def prevent_sleep(is_wanted: bool = True) -> Iterator[bool]:
    """Prevent idle sleep inside the `with` block, and yield whether that was possible.

    caffeinate waits for this process (-w), so that a killed run does not keep the machine awake forever.
    """
    program = shutil.which(_CAFFEINATE) if is_wanted else None
    if program is None:
        yield False
        return
    try:
        # Start caffeinate in a new session: after Ctrl-C the run still saves, so the machine must stay awake.
        helper = subprocess.Popen(
            [program, "-i", "-w", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        helper.terminate()
        helper.wait()


_MAX_CHARACTERS = 200
# The texts are passed as arguments and not inserted into the script, so that they cannot run code.
_APPLE_SCRIPT = ("on run words", "display notification (item 2 of words) with title (item 1 of words)", "end run")
# These terminals do not support notifications, so only the bell rings.
_SILENT_TERMINALS = ("dumb", "linux")
# These terminals support rxvt's escape sequence. Most other terminals support iTerm's sequence, or ignore it.
_OTHER_TERMINALS = ("rxvt", "foot")


def notify(title: str, text: str, *, terminal: TextIO | None = None, run: ProgramRunner = run_program) -> str | None:
    """Show a notification. Return None on success, or the reason for the failure."""
    title, text = _clean_text(title), _clean_text(text)
    command, problem = desktop_command(title, text)
    # run() returns the output, which may be empty. None means that the program failed.
    if command is not None and run(command) is not None:
        return None
    if terminal is not None and terminal.isatty():
        terminal.write(escape_sequence(title, text, kind=env.read("TERM") or "dumb"))
        terminal.flush()
        return None
    return problem or f"{command[0] if command else 'the desktop'} failed"


def desktop_command(title: str, text: str, *, platform: str = sys.platform) -> tuple[list[str] | None, str | None]:
    """Return the command that shows a desktop notification and None, or None and the reason why there is no command."""
    if platform == "darwin":
        program = shutil.which("osascript")
        lines = [word for line in _APPLE_SCRIPT for word in ("-e", line)]
        return ([program, *lines, title, text], None) if program else (None, "no osascript here")
    if env.read("DISPLAY") is None and env.read("WAYLAND_DISPLAY") is None:
        return None, "no desktop here (DISPLAY is not set), and no terminal"
    program = shutil.which("notify-send")
    # Escape the text, because desktops interpret markup such as <b>.
    arguments = ["--app-name=whet", "--", title, escape(text, quote=False)]
    return ([program, *arguments], None) if program else (None, "no notify-send here")


def escape_sequence(title: str, text: str, *, kind: str) -> str:
    """Return the escape sequence for a terminal notification and bell. `kind` is the value of $TERM.

    >>> escape_sequence("whet", "done", kind="xterm-256color")
    '\\x1b]9;whet: done\\x1b\\\\\\x07'
    """
    if kind.startswith(_SILENT_TERMINALS):
        return "\a"
    if kind.startswith(_OTHER_TERMINALS):
        return f"\x1b]777;notify;{title.replace(';', ',')};{text}\x1b\\\a"
    return f"\x1b]9;{title}: {text}\x1b\\\a"


def _clean_text(text: str) -> str:
    """Return one line without control characters, and without a leading dash that would make it an option."""
    return (clean_name(text[:_MAX_CHARACTERS]) or "whet").lstrip("-") or "whet"
