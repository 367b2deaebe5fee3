"""Signals, exit codes and garbage collection of this process."""

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Keeps the collector out of the steps: a full pass over a large process takes longer than a step.

    What is there already is set aside, so that the passes between epochs look at what is new only.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def freeze_live_objects() -> None:
    """What is there by now, and no garbage, is passed over as well until `gc_disabled` ends."""
    gc.collect()
    gc.freeze()


class TerminatedError(SystemExit):
    """A second SIGTERM. Like SystemExit it ends a program quietly, with its code; nobody's code has failed."""

    def __init__(self, number: int) -> None:
        super().__init__(exit_code(number))
        self.exit_code = exit_code(number)


def exit_code(number: int) -> int:
    """What a shell expects of a process that was stopped by this signal.

    >>> exit_code(signal.SIGINT), exit_code(signal.SIGTERM)
    (130, 143)
    """
    return 128 + number


def stop_immediately(number: int) -> NoReturn:
    """What the handler of a second signal does."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise TerminatedError(number)


def stop_message(number: int, *, when: str) -> str:
    """What is said when the first signal has come, and how to hurry.

    >>> first_words(signal.SIGINT, when="after this step")
    'stopping after this step; Ctrl-C once more stops at once'
    >>> first_words(signal.SIGTERM, when="after this step")
    'SIGTERM: stopping after this step; a second one stops at once'
    """
    if number == signal.SIGINT:
        return f"stopping {when}; Ctrl-C once more stops at once"
    return f"{signal.Signals(number).name}: stopping {when}; a second one stops at once"
