"""Keep a Mac awake while it trains."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

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
