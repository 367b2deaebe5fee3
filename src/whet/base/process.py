"""Signals, time limits, exit codes and garbage collection of this process."""

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

SignalHandler = Callable[[int, FrameType | None], None]


class TerminatedError(SystemExit):
    """Raised on a second SIGTERM. Like SystemExit, it ends the program quietly with its exit code."""

    def __init__(self, number: int) -> None:
        super().__init__(exit_code(number))
        self.exit_code = exit_code(number)


def exit_code(number: int) -> int:
    """Return the exit code that shells report for a process that this signal ended.

    >>> exit_code(signal.SIGINT), exit_code(signal.SIGTERM)
    (130, 143)
    """
    return 128 + number


def signal_name(number: int) -> str:
    """Return the name of a signal, including signals that Python does not define.

    >>> signal_name(9), signal_name(40)
    ('SIGKILL', 'signal 40')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit_code(code: int) -> str:
    """Describe an exit code, which is negative for a process that a signal killed.

    >>> describe_exit_code(3), describe_exit_code(-9)
    ('exit code 3', 'killed by SIGKILL')
    """
    return f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"


def kill_with_parent() -> None:
    """Let Linux kill this process as soon as its parent ends. Other systems cannot."""
    if sys.platform == "linux":
        # The value of PR_SET_PDEATHSIG in prctl(2).
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def watch_parent(parent: int, on_end: Callable[[], None]) -> None:
    """Start a thread that calls `on_end` once `parent` is no longer the parent process of this one."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        on_end()

    threading.Thread(target=watch, daemon=True, name="parent").start()


def stop_immediately(number: int) -> NoReturn:
    """Raise the exception that stops the process without finishing its work, for a second signal."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise TerminatedError(number)


@contextmanager
def handle_signals(handler: SignalHandler, *numbers: int) -> Iterator[None]:
    """Handle these signals with `handler` inside the `with` block, and restore the previous handlers afterward."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def stop_message(number: int, *, when: str) -> str:
    """Return the message that is printed after the first signal. It says what a second one does.

    >>> stop_message(signal.SIGINT, when="after this step")
    'stopping after this step; a second Ctrl-C stops without saving'
    >>> stop_message(signal.SIGTERM, when="after this step")
    'SIGTERM: stopping after this step; a second one stops without saving'
    """
    if number == signal.SIGINT:
        return f"stopping {when}; a second Ctrl-C stops without saving"
    return f"{signal_name(number)}: stopping {when}; a second one stops without saving"


class TimeLimitError(BaseException):
    """Raised in code that exceeds its time limit. Not a subclass of Exception, which libraries may catch and ignore."""


_REPEAT_SECONDS = 2.0
"""Interval of repeated alarms. One is not enough: Python drops exceptions raised in a destructor or a C callback."""


def interrupt_obstacle() -> str | None:
    """Return why `interrupt_after` cannot be used here, or None if it can."""
    if threading.current_thread() is not threading.main_thread():
        return "only the main thread can be interrupted"
    if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL or any(signal.getitimer(signal.ITIMER_REAL)):
        return "this program uses SIGALRM itself"
    return None


@contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError inside the `with` block after `seconds`. Check `interrupt_obstacle` first.

    A call into C code is interrupted when it returns.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise TimeLimitError

    with handle_signals(interrupt, signal.SIGALRM):
        try:
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), _REPEAT_SECONDS)
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable the garbage collector inside the `with` block: a full collection takes longer than a training step.

    Objects that exist already are frozen, so that collections between epochs visit only new objects.
    """
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    # disable() alone is not enough: gc.collect() between epochs would still visit every object of torch.
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        # gc.unfreeze() unfreezes all objects, so a measurement within a training run leaves it to the outer block.
        if not was_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def freeze_live_objects() -> None:
    """Collect garbage once, and exclude the remaining objects from collections until `gc_disabled` ends."""
    gc.collect()
    gc.freeze()
