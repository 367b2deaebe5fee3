"""Keeps a Mac from falling asleep while it trains. Written from caffeinate(8); never run on a real Mac."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

PROGRAM = "caffeinate"
NO_CAFFEINATE = "no caffeinate here, so the machine may fall asleep while it trains"


@contextlib.contextmanager
def kept_awake(is_wanted: bool = True) -> Iterator[bool]:
    """While entered, the machine does not sleep for want of a user; whether that could be asked for.

    caffeinate itself waits for this process (-w), so that a killed run does not keep the machine awake for ever.
    """
    program = shutil.which(PROGRAM) if is_wanted else None
    if program is None:
        yield False
        return
    try:
        # In a session of its own: Ctrl-C asks the run to stop, which then still needs a machine that is awake.
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
