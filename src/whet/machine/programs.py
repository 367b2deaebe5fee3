"""Run other programs and parse their output.

If a program is missing, fails, hangs or prints unexpected text, the fact is unknown, and no error is raised.
"""

import re
import subprocess
from collections.abc import Sequence
from typing import Protocol

from whet.base import env
from whet.base.units import one_line

# Programs such as nvidia-smi can hang with a broken driver.
TIMEOUT_SECONDS = 5.0
_MAX_NAME = 120


class ProgramRunner(Protocol):
    """Runs a program and returns its stdout, or None. Tests replace it with samples."""

    def __call__(self, command: Sequence[str], *, any_exit: bool = False) -> str | None: ...


def run_program(
    command: Sequence[str], *, any_exit: bool = False, timeout_seconds: float = TIMEOUT_SECONDS
) -> str | None:
    """Run a program and return its stdout, or None if it is missing, fails, hangs or its output is not UTF-8.

    `any_exit` also accepts the output of a program that exits with an error: sysctl does when one of several names is
    unknown, and nvidia-smi does when there is no card.
    """
    try:
        done = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=timeout_seconds,
            env=env.c_locale_environment(),
            # close_fds=False lets Python use posix_spawn; fork() would copy the page tables of a large process.
            close_fds=False,
            check=False,
        )
        if done.returncode != 0 and not any_exit:
            return None
        return done.stdout.decode("utf-8")
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def complete_lines(text: str | None) -> list[str]:
    """Return the lines that end with a newline. A truncated last line is dropped, because it may end inside a number.

    >>> complete_lines("hw.ncpu: 8\\nhw.memsize: 8589")
    ['hw.ncpu: 8']
    """
    return [line.rstrip("\r") for line in (text or "").split("\n")[:-1]]


def whole_number(text: object) -> int | None:
    """Parse a count or size in plain digits, or return None.

    >>> whole_number(" 8 "), whole_number("-1"), whole_number("0x10"), whole_number(None)
    (8, None, None, None)
    """
    match = re.fullmatch(r"\s*(\d{1,18})\s*", text, re.ASCII) if isinstance(text, str) else None
    return int(match[1]) if match else None


def positive_number(text: object) -> int | None:
    """Parse a positive integer, or return None. No machine has 0 cores or 0 bytes."""
    return whole_number(text) or None


def clean_name(text: object) -> str | None:
    """Return a name that can be printed on one line, or None if it has no printable characters.

    >>> clean_name("  Apple   M2\\n"), clean_name("\\x00"), clean_name(7)
    ('Apple M2', None, None)
    """
    if not isinstance(text, str):
        return None
    return one_line(text)[:_MAX_NAME] or None
