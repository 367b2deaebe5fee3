"""What is there once per process: the compiled part, and the Mac that it was asked to be."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from whet.base.errors import UsageError
from whet.machine.facts import Machine


@dataclass
class Loaded:
    native: ModuleType | None = None
    kernels: frozenset[str] = frozenset()
    """Operators, without their overloads, that are computed by a kernel of the virtual GPU."""
    asked: Machine | None = None
    undo: list[Callable[[], None]] | None = None


here = Loaded()


def native() -> Any:
    """The compiled part."""
    if here.native is None:
        raise UsageError("there is no virtual Mac in this process", try_='virtual_mac.install("m2-air-8gb")')
    return here.native
