"""Compact arrays with facts about all rows, and duplicate detection by hash.

A row takes about 50 bytes, regardless of its length, so millions of rows fit into memory. Texts are compared by 64-bit
hashes. The probability of any collision among a million different texts is 3 in 10^8.
"""

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

MAX_LABELS = 65_536
TRAIN, VAL, TEST = 0, 1, 2
"""Split numbers. A text in several splits is kept in the highest: held-out rows are scarcer than training rows."""
_SPLIT_NAMES = ("train", "val", "test")


class Duplicate(NamedTuple):
    """A row and the row that it repeats."""

    kind: str
    row: int
    other: int


class TextHashes:
    """The hashes, labels and splits of all rows, to find duplicates."""

    def __init__(self) -> None:
        self.exact = array("q")
        self.normalized = array("q")
        self.label = array("i")
        self.split = array("b")

    def add(self, exact: str, normalized: str, *, label: int, split: int) -> None:
        """Add a row. A row with a negative label is not compared with any other row."""
        self.exact.append(hash(exact))
        self.normalized.append(hash(normalized))
        self.label.append(label)
        self.split.append(split)

    def skip(self, *, split: int) -> None:
        """Add a row that has no usable text, and is therefore not compared with other rows."""
        self.add("", "", label=-1, split=split)

    def duplicates(self) -> Iterator[Duplicate]:
        """Yield the rows that repeat another row. A row may be yielded several times, with different kinds."""
        for rows in self._equal_rows():
            yield from self._in_group(rows)

    def breakdown(self) -> dict[str, Counter[str]]:
        """Count leaks by pair of splits, and texts and rows with contradictory labels."""
        result: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for rows in self._equal_rows():
            texts: defaultdict[int, set[int]] = defaultdict(set)
            for row in rows:
                texts[self.split[row]].add(self.exact[row])
            for row in rows:
                for lower in sorted(split for split in texts if split < self.split[row]):
                    kind = "leak" if self.exact[row] in texts[lower] else "near-leak"
                    result[kind][f"{_SPLIT_NAMES[self.split[row]]} in {_SPLIT_NAMES[lower]}"] += 1
            if len({self.label[row] for row in rows}) > 1:
                result["two-labels"].update(texts=1, rows=len(rows))
        return dict(result)

    def removable(self) -> Iterator[Duplicate]:
        """Yield the rows to remove, so that each text occurs once at most.

        If the rows of a text in one split have different labels, all of them are removed.
        """
        for rows in self._equal_rows():
            highest = max(self.split[row] for row in rows)
            by_split: defaultdict[int, list[int]] = defaultdict(list)
            for row in rows:
                by_split[self.split[row]].append(row)
            for split, inside in by_split.items():
                conflicting = [row for row in inside if self.label[row] != self.label[inside[0]]]
                if conflicting:
                    yield from (
                        Duplicate("two-labels", row, conflicting[0] if row == inside[0] else inside[0])
                        for row in inside
                    )
                elif split < highest:
                    kept = by_split[highest][0]
                    kind = "leak" if self.exact[inside[0]] == self.exact[kept] else "near-leak"
                    yield from (Duplicate(kind, row, kept) for row in inside)
                else:
                    yield from (match for match in self._in_group(inside) if match.kind.endswith("duplicate"))

    def _equal_rows(self) -> Iterator[list[int]]:
        """Yield groups of rows with the same normalized text, in file order."""
        import numpy as np

        labels = np.frombuffer(self.label, dtype=np.int32) if self.label else np.empty(0, dtype=np.int32)
        rows = np.flatnonzero(labels >= 0)
        hashes = np.frombuffer(self.normalized, dtype=np.int64)[rows] if len(rows) else np.empty(0, dtype=np.int64)
        # A stable sort keeps rows with equal texts in file order.
        order = np.argsort(hashes, kind="stable")
        hashes, rows = hashes[order], rows[order]
        bounds = np.flatnonzero(np.concatenate(([True], hashes[1:] != hashes[:-1], [True])))
        groups = [
            rows[start : start + size].tolist()
            for start, size in zip(bounds[:-1], np.diff(bounds), strict=True)
            if size > 1
        ]
        yield from sorted(groups)

    def _in_group(self, rows: list[int]) -> Iterator[Duplicate]:
        """Yield the duplicates among rows with the same normalized text, with their kinds."""
        first_with: dict[tuple[int, ...], int] = {}
        in_lower_splits: dict[int, int] = {}
        by_label: dict[int, int] = {}
        for split, inside in groupby(
            sorted(rows, key=lambda row: (self.split[row], row)), key=lambda row: self.split[row]
        ):
            in_this_split: dict[int, int] = {}
            for row in inside:
                exact, label = self.exact[row], self.label[row]
                if in_lower_splits:
                    kind = "leak" if exact in in_lower_splits else "near-leak"
                    yield Duplicate(kind, row, in_lower_splits.get(exact, next(iter(in_lower_splits.values()))))
                if (split, label, exact) in first_with:
                    yield Duplicate("duplicate", row, first_with[split, label, exact])
                elif (split, label) in first_with:
                    yield Duplicate("near-duplicate", row, first_with[split, label])
                first_with.setdefault((split, label, exact), row)
                first_with.setdefault((split, label), row)
                in_this_split.setdefault(exact, row)
                by_label.setdefault(label, row)
            # Splits are visited in ascending order, so these rows are in lower splits than those of later iterations.
            in_lower_splits = {**in_this_split, **in_lower_splits}
        if len(by_label) > 1:
            for row in rows:
                other = next(first for label, first in by_label.items() if label != self.label[row])
                yield Duplicate("two-labels", row, other)


class RowIndex:
    """The location of each row, and facts about its text. Rows are numbered in reading order."""

    def __init__(self, sources: tuple[TextSource, ...]) -> None:
        self.sources = sources
        self.hashes = TextHashes()
        self.labels: list[str] = []
        """The distinct label cells, as written in the file."""
        self._label_numbers: dict[str, int] = {}
        self._source = array("H")
        self._line = array("Q")
        self._number = array("I")
        self.scripts: list[str] = []
        """The script of each text; empty for a text without letters."""
        self.characters = array("I")
        self.words = array("I")
        self._files: dict[int, list[str]] = {}

    def __len__(self) -> int:
        return len(self._line)

    def add(self, sample: TextSample, *, source: int) -> None:
        """Add the location of a row. Its text is added to `hashes` separately."""
        self._source.append(source)
        self._line.append(sample.row.line)
        self._number.append(sample.number)

    def rows_of(self, source: int) -> int:
        return self._source.count(source)

    def label_number(self, cell: str) -> int:
        """Return the index of a label cell. A new label cell gets the next index."""
        number = self._label_numbers.setdefault(cell, len(self.labels))
        if number == len(self.labels):
            if number >= MAX_LABELS:
                raise UsageError(
                    f"over {MAX_LABELS:,} different labels",
                    got=f"such as {cell[:60]!r} and {self.labels[0][:60]!r}",
                    try_="label_column=NAME",
                )
            self.labels.append(cell)
        return number

    def where(self, row: int) -> str:
        """Return the location of a row as FILE:LINE, with the number of the text if a line has several."""
        index = self._source[row]
        source = self.sources[index]
        if source.format == "class folders":
            if index not in self._files:
                self._files[index] = file_names(source.path)
            return str(Path(source.path, self._files[index][self._line[row] - 1]))
        number = f" [{self._number[row]}]" if self._number[row] else ""
        return f"{source.path}:{self._line[row]}{number}"


def length_stats(values: "array[int]") -> LengthStats | None:
    """Return minimum, median, 95th percentile and maximum; None without values.

    >>> length_stats(array("I", [20, 21])).p95, length_stats(array("I", range(1, 101))).p95
    (21, 95)
    """
    import numpy as np

    if not values:
        return None
    ordered = np.sort(np.frombuffer(values, dtype=np.uint32))
    last = len(ordered) - 1
    return LengthStats(
        min=int(ordered[0]),
        median=int(ordered[last // 2]),
        p95=int(ordered[-(-95 * len(ordered) // 100) - 1]),
        max=int(ordered[last]),
    )


def label_totals(counts: Counter[tuple[str, str]]) -> Counter[str]:
    """Return the number of rows of each label, summed over the splits."""
    totals: Counter[str] = Counter()
    for (label, _), count in counts.items():
        totals[label] += count
    return totals
