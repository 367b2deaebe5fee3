"""Which warnings of torch are already answered by whet? Those, and no others, are left out while a run trains."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

FELL_BACK = r"The operator '[\w:.]+' is not currently supported on the MPS backend and will fall back"
"""Names the first operator only; with the fall-back, a run's report names them all and what they cost."""
NOT_PINNED = r"'pin_memory' argument is set as true but not supported on MPS"
"""Rule L3 has said so, and nothing is pinned."""


@contextmanager
def handled_warnings(*, has_fallback: bool) -> Iterator[None]:
    """While entered, what whet has said itself is not said again."""
    with warnings.catch_warnings():
        for text in (NOT_PINNED, *((FELL_BACK,) if has_fallback else ())):
            warnings.filterwarnings("ignore", message=text, category=UserWarning)
        yield
