"""Compact arrays about every row, and duplicate detection by hash."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from whet.base.errors import UsageError
from whet.recipes.text.data_report.report import LengthStats
from whet.recipes.text.readers.rows import TextSource
from whet.recipes.text.readers.samples import TextSample
from whet.recipes.text.readers.sources import file_names

TRAIN, VAL, TEST = 0, 1, 2
"""The higher part keeps a text that two parts have: what is judged by is worth more than what is learned from."""


class Duplicate(NamedTuple):
    """A row and another one that it repeats."""

    kind: str
    row: int
    other: int


class TextHashes:
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

    def repeats(self) -> Iterator[Duplicate]:
        """Every row that repeats another, group by group."""
        for rows in self._same():
            yield from self._of_group(rows)

    def removable(self) -> Iterator[Duplicate]:
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
                        Duplicate("two-labels", row, others[0] if row == inside[0] else inside[0]) for row in inside
                    )
                elif part < highest:
                    keeper = by_part[highest][0]
                    kind = "leak" if self.exact[inside[0]] == self.exact[keeper] else "folded-leak"
                    yield from (Duplicate(kind, row, keeper) for row in inside)
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

    def _of_group(self, rows: list[int]) -> Iterator[Duplicate]:
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
                    yield Duplicate(kind, row, lower.get(exact, next(iter(lower.values()))))
                if (part, label, exact) in firsts:
                    yield Duplicate("duplicate", row, firsts[part, label, exact])
                elif (part, label) in firsts:
                    yield Duplicate("folded-duplicate", row, firsts[part, label])
                firsts.setdefault((part, label, exact), row)
                firsts.setdefault((part, label), row)
                here.setdefault(exact, row)
                by_label.setdefault(label, row)
            lower = {**here, **lower}
        if len(by_label) > 1:
            for row in rows:
                other = next(first for label, first in by_label.items() if label != self.label[row])
                yield Duplicate("two-labels", row, other)


MAX_LABELS = 65_536


class RowIndex:
    """Rows by number, in the order in which they are read."""

    def __init__(self, sources: tuple[TextSource, ...]) -> None:
        self.sources = sources
        self.texts = TextHashes()
        self.names: list[str] = []
        """Label cells as written, by number."""
        self._numbers: dict[str, int] = {}
        self._source = array("H")
        self._line = array("Q")
        self._within = array("I")
        self.script = array("B")
        self.characters = array("I")
        self.words = array("I")
        self._files: dict[int, list[str]] = {}

    def __len__(self) -> int:
        return len(self._line)

    def place(self, sample: TextSample, *, source: int) -> None:
        """Takes in where a row stands; the texts take in what it holds."""
        self._source.append(source)
        self._line.append(sample.row.line)
        self._within.append(sample.number)

    def rows_of(self, source: int) -> int:
        """How many rows a source has."""
        return self._source.count(source)

    def label_number(self, name: str) -> int:
        """The number of a label cell."""
        number = self._numbers.setdefault(name, len(self.names))
        if number == len(self.names):
            if number >= MAX_LABELS:
                raise UsageError(
                    f"over {MAX_LABELS:,} different labels",
                    got=f"such as {name[:60]!r} and {self.names[0][:60]!r}",
                    try_="label_column=NAME",
                )
            self.names.append(name)
        return number

    def where(self, row: int) -> str:
        """FILE:LINE of a row; of several texts in one line with its number."""
        index = self._source[row]
        source = self.sources[index]
        if source.form == "class folders":
            if index not in self._files:
                self._files[index] = file_names(source.path)
            return str(Path(source.path, self._files[index][self._line[row] - 1]))
        within = f" [{self._within[row]}]" if self._within[row] else ""
        return f"{source.path}:{self._line[row]}{within}"


def length_stats(values: "array[int]") -> LengthStats | None:
    """Least, median, the least that 95 of 100 do not exceed, and most; None of nothing.

    >>> spread(array("I", [20, 21])).most_of_95, spread(array("I", range(1, 101))).most_of_95
    (21, 95)
    """
    import numpy as np

    if not values:
        return None
    ordered = np.sort(np.frombuffer(values, dtype=np.uint32))
    last = len(ordered) - 1
    return LengthStats(
        least=int(ordered[0]),
        median=int(ordered[last // 2]),
        most_of_95=int(ordered[-(-95 * len(ordered) // 100) - 1]),
        most=int(ordered[last]),
    )


def label_totals(counts: Counter[tuple[str, str]]) -> Counter[str]:
    """Counts by label and part as counts by label."""
    totals: Counter[str] = Counter()
    for (label, _), count in counts.items():
        totals[label] += count
    return totals
