"""Has torch's compiler made anything of a model? What it cannot follow it runs as written, without a word."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

_NAME = "__compiled_fn"
"""What code that torch's compiler has rewritten calls a graph that it has compiled."""


def num_graphs() -> int:
    """How many graphs were compiled in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def runs_compiled(go: Callable[[], object]) -> bool:
    """Whether `go` comes through a compiled graph, be it one from long ago; True where that cannot be seen."""
    if sys.getprofile() is not None:
        # A profiler of yours is on, and there can be only one.
        return True
    is_found = False

    def look(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal is_found
        if event == "call" and not is_found:
            is_found = any(name.startswith(_NAME) for name in frame.f_code.co_names)

    sys.setprofile(look)
    try:
        go()
    finally:
        sys.setprofile(None)
    return is_found
