"""How does a child notice that nobody waits for it any longer? Its questions end, and so does it, with all it began."""

import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TextIO


def questions() -> Iterator[str]:
    """The lines of stdin, for this reader alone; when they end, this process does at once, whatever it is doing."""
    # Code that we run may read stdin as well, and would take a question for its own.
    ours = os.fdopen(os.dup(sys.stdin.fileno()))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_pump, args=(ours, lines), daemon=True, name="questions").start()
    while True:
        yield lines.get()


def _pump(stream: TextIO, lines: "queue.SimpleQueue[str]") -> None:
    for line in stream:
        lines.put(line)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
