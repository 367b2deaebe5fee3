"""The process in which a trial is trained: it tells of every evaluation, and waits to hear whether it may go on."""

import contextlib
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from whet.base.errors import DivergedError, NoMemoryError, WhetError
from whet.base.stopping import StoppedError
from whet.measure.lifeline import questions

MARK = "whet-trial "
OUT_OF_MEMORY = 75
DIVERGED = 76
"""Exit codes that say why there is no value."""


class Line:
    """Between a trial and its worker: one message, one answer."""

    def __init__(self, answers: int, asked: Iterator[str]) -> None:
        self._answers = answers
        self._asked = asked

    def say(self, message: dict[str, Any]) -> None:
        os.write(self._answers, (MARK + json.dumps(message) + "\n").encode())

    def may_go_on(self, *, number: int, value: float, is_last: bool) -> bool:
        """Tells the value of evaluation `number`; False when the trial is to end here."""
        self.say({"evaluation": number, "value": value, "is_last": is_last})
        return next(self._asked).strip() != "stop"


def main() -> None:
    """The first line on stdin says what to train; the target gets it together with the line to the worker."""
    # What torch or a recipe prints goes to stderr: stdout belongs to the messages.
    answers = os.dup(1)
    os.dup2(2, 1)
    asked = questions()
    opening = json.loads(next(asked))
    line = Line(answers, asked)
    module, _, name = opening["target"].partition(":")
    code = 1
    try:
        code = getattr(importlib.import_module(module), name)(opening["arguments"], line)
    except BaseException as error:
        code = _told(error, line)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Without the usual way out: a thread waits for answers.
    os._exit(code)


def _told(error: BaseException, line: Line) -> int:
    from whet.device.oom import is_out_of_memory

    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, StoppedError):
        return error.exit_code
    traceback.print_exc()
    words = f"{error.what}: {error.got}" if isinstance(error, WhetError) else f"{type(error).__name__}: {error}"
    line.say({"failure": " ".join(words.split())[:500]})
    if isinstance(error, DivergedError):
        return DIVERGED
    if isinstance(error, NoMemoryError):
        return OUT_OF_MEMORY
    chain: BaseException | None = error
    while chain is not None:
        if is_out_of_memory(chain):
            return OUT_OF_MEMORY
        chain = chain.__cause__ or chain.__context__
    return 1


def stop_here() -> None:
    """Ends a training as Ctrl-C would: the step is done, everything is saved."""
    signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    main()
