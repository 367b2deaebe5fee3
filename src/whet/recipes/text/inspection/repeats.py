"""Which texts occur again: inside a part, in another part, with another label? Eight bytes a text, whatever its length.

Texts are compared by 64-bit hashes: the chance that any two of a million different texts share one is 3 in 10^8.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

TRAIN, DEV, TEST = 0, 1, 2
"""The higher part keeps a text that two parts have: what is judged by is worth more than what is learned from."""


class Repeat(NamedTuple):
    """A row and another one that it repeats."""

    kind: str
    row: int
    other: int


class Texts:
    """Hashes, labels and parts of all rows."""

    def __init__(self) -> None:
        self.exact = array("q")
        self.folded = array("q")
        self.label = array("i")
        self.part = array("b")

    def add(self, exact: str, folded: str, *, label: int, part: int) -> None:
        """Takes a row in; a hollow text has no label and is compared with nothing."""
        self.exact.append(hash(exact))
        self.folded.append(hash(folded))
        self.label.append(label)
        self.part.append(part)

    def skip(self, *, part: int) -> None:
        """Takes in a row that holds no text to compare."""
        self.add("", "", label=-1, part=part)

    def repeats(self) -> Iterator[Repeat]:
        """Every row that repeats another, group by group."""
        for rows in self._same():
            yield from self._of_group(rows)

    def removable(self) -> Iterator[Repeat]:
        """The rows to take out, so that each text is in one part, once, and with one label there."""
        for rows in self._same():
            highest = max(self.part[row] for row in rows)
            by_part: defaultdict[int, list[int]] = defaultdict(list)
            for row in rows:
                by_part[self.part[row]].append(row)
            for part, inside in by_part.items():
                others = [row for row in inside if self.label[row] != self.label[inside[0]]]
                if others:
                    yield from (
                        Repeat("two-labels", row, others[0] if row == inside[0] else inside[0]) for row in inside
                    )
                elif part < highest:
                    keeper = by_part[highest][0]
                    kind = "leak" if self.exact[inside[0]] == self.exact[keeper] else "folded-leak"
                    yield from (Repeat(kind, row, keeper) for row in inside)
                else:
                    yield from (repeat for repeat in self._of_group(inside) if repeat.kind.endswith("duplicate"))

    def _same(self) -> Iterator[list[int]]:
        """Rows of the same folded text, where there are several, in the order of the file."""
        import numpy as np

        labels = np.frombuffer(self.label, dtype=np.int32) if self.label else np.empty(0, dtype=np.int32)
        rows = np.flatnonzero(labels >= 0)
        hashes = np.frombuffer(self.folded, dtype=np.int64)[rows] if len(rows) else np.empty(0, dtype=np.int64)
        order = np.argsort(hashes, kind="stable")
        hashes, rows = hashes[order], rows[order]
        borders = np.flatnonzero(np.concatenate(([True], hashes[1:] != hashes[:-1], [True])))
        found = [
            rows[start : start + size].tolist()
            for start, size in zip(borders[:-1], np.diff(borders), strict=True)
            if size > 1
        ]
        yield from sorted(found)

    def _of_group(self, rows: list[int]) -> Iterator[Repeat]:
        firsts: dict[tuple[int, ...], int] = {}
        lower: dict[int, int] = {}
        by_label: dict[int, int] = {}
        for part, inside in groupby(
            sorted(rows, key=lambda row: (self.part[row], row)), key=lambda row: self.part[row]
        ):
            here: dict[int, int] = {}
            for row in inside:
                exact, label = self.exact[row], self.label[row]
                if lower:
                    kind = "leak" if exact in lower else "folded-leak"
                    yield Repeat(kind, row, lower.get(exact, next(iter(lower.values()))))
                if (part, label, exact) in firsts:
                    yield Repeat("duplicate", row, firsts[part, label, exact])
                elif (part, label) in firsts:
                    yield Repeat("folded-duplicate", row, firsts[part, label])
                firsts.setdefault((part, label, exact), row)
                firsts.setdefault((part, label), row)
                here.setdefault(exact, row)
                by_label.setdefault(label, row)
            lower = {**here, **lower}
        if len(by_label) > 1:
            for row in rows:
                other = next(first for label, first in by_label.items() if label != self.label[row])
                yield Repeat("two-labels", row, other)
