"""What must a device offer that can capture work once and replay it as one launch?"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

Made = TypeVar("Made")

Replay = Callable[[], None]
"""Does captured work again, on the same memory; Python is not asked again."""


class AbstractGraphs(ABC):
    """Captures work. Everything captured by one of these shares a pool of memory, so two are never replayed at once.

    Capturing computes nothing: no tensor that was there before and no generator of the device has changed afterwards.
    What Python did meanwhile stays done.
    """

    @abstractmethod
    def warm_up(self) -> AbstractContextManager[list[str]]:
        """Where work runs before it is captured; the list tells what in it waited for the device, with its line."""

    @abstractmethod
    def capture(self, work: Callable[[], Made]) -> tuple[Replay, Made]:
        """How to do the work again, and what it made: tensors that each replay fills anew.

        Raises what the work raised. Then nothing captured before may be replayed any more, and the device computes on.
        """

    @abstractmethod
    def forget(self) -> None:
        """Nothing captured so far will be replayed any more: what comes next has a pool of its own."""
