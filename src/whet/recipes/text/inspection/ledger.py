"""What is remembered of each row? A few numbers in arrays, about 50 bytes, so that a million rows are little."""

from array import array
from collections import Counter
from pathlib import Path

from whet.base.errors import UsageError
from whet.recipes.text.inspection.repeats import Texts
from whet.recipes.text.inspection.report import Spread
from whet.recipes.text.rows.class_folders import file_names
from whet.recipes.text.rows.row import Source
from whet.recipes.text.rows.samples import Sample

MOST_LABELS = 65_536


class Ledger:
    """Rows by number, in the order in which they are read."""

    def __init__(self, sources: tuple[Source, ...]) -> None:
        self.sources = sources
        self.texts = Texts()
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

    def place(self, sample: Sample, *, source: int) -> None:
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
            if number >= MOST_LABELS:
                raise UsageError(
                    f"over {MOST_LABELS:,} different labels",
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


def spread(values: "array[int]") -> Spread | None:
    """Least, median, the least that 95 of 100 do not exceed, and most; None of nothing.

    >>> spread(array("I", [20, 21])).most_of_95, spread(array("I", range(1, 101))).most_of_95
    (21, 95)
    """
    import numpy as np

    if not values:
        return None
    ordered = np.sort(np.frombuffer(values, dtype=np.uint32))
    last = len(ordered) - 1
    return Spread(
        least=int(ordered[0]),
        median=int(ordered[last // 2]),
        most_of_95=int(ordered[-(-95 * len(ordered) // 100) - 1]),
        most=int(ordered[last]),
    )


def merged(counts: Counter[tuple[str, str]]) -> Counter[str]:
    """Counts by label and part as counts by label."""
    totals: Counter[str] = Counter()
    for (label, _), count in counts.items():
        totals[label] += count
    return totals
