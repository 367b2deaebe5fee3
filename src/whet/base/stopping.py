"""How is a program asked to stop? The first signal lets it end what it does; a second one stops it at once."""

import signal
from typing import NoReturn


class StoppedError(SystemExit):
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


def stop_at_once(number: int) -> NoReturn:
    """What the handler of a second signal does."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise StoppedError(number)


def first_words(number: int, *, when: str) -> str:
    """What is said when the first signal has come, and how to hurry.

    >>> first_words(signal.SIGINT, when="after this step")
    'stopping after this step; Ctrl-C once more stops at once'
    >>> first_words(signal.SIGTERM, when="after this step")
    'SIGTERM: stopping after this step; a second one stops at once'
    """
    if number == signal.SIGINT:
        return f"stopping {when}; Ctrl-C once more stops at once"
    return f"{signal.Signals(number).name}: stopping {when}; a second one stops at once"
