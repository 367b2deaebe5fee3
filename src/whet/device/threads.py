"""How many threads does torch compute with on the CPU? It is told only where that changes the number."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def use_threads(number: int) -> None:
    """From now on torch computes with so many threads."""
    # Setting the number that holds already is not nothing: it made a CPU's attention a third slower (docs/lab.md).
    if number != torch.get_num_threads():
        torch.set_num_threads(number)


@contextmanager
def threads_kept() -> Iterator[None]:
    """Whoever changes the number inside, afterwards it is what it was."""
    number = torch.get_num_threads()
    try:
        yield
    finally:
        use_threads(number)
