"""Which documents share a row? They are put where they fit best, among a few open rows, as they come."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import numpy as np

Document = TypeVar("Document")
Array = np.ndarray[Any, np.dtype[Any]]

OPEN_ROWS = 64
"""So many rows are held in memory at most."""


class Packer(Generic[Document]):
    """Documents in, full rows out; the fullest row goes first, so that memory is bounded."""

    def __init__(self, row_length: int, *, open_rows: int = OPEN_ROWS) -> None:
        self._row_length = row_length
        self._most = open_rows
        self._rows: dict[int, list[Document]] = {}
        self._room: list[tuple[int, int]] = []
        """(tokens that are free, number of the row), the fullest first."""
        self._next = 0

    def add(self, document: Document, length: int) -> list[Document] | None:
        """Takes a document; gives a row that is complete now, if there is one."""
        place = bisect_left(self._room, (length, -1))
        if place < len(self._room):
            room, row = self._room.pop(place)
        else:
            room, row = self._row_length, self._next
            self._rows[row] = []
            self._next += 1
        self._rows[row].append(document)
        insort(self._room, (room - length, row))
        if self._room[0][0] == 0 or len(self._room) > self._most:
            return self._rows.pop(self._room.pop(0)[1])
        return None

    def rest(self) -> Iterator[list[Document]]:
        """The rows that are still open, the fullest first."""
        for _, row in self._room:
            yield self._rows.pop(row)


def rows_of(lengths: Array, *, row_length: int) -> Array:
    """The first document of each row and the end, for documents that stay in their order.

    >>> rows_of(np.array([3, 2, 4, 1, 5]), row_length=5).tolist()
    [0, 2, 4, 5]
    """
    ends = np.cumsum(lengths)
    rows, taken = [0], 0
    while rows[-1] < len(ends):
        following = max(int(np.searchsorted(ends, taken + row_length, side="right")), rows[-1] + 1)
        rows.append(following)
        taken = int(ends[following - 1])
    return np.array(rows, dtype=np.int64)
