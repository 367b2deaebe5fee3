"""What is a labelled text, and how does a row become one, or several?"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from whet.recipes.text.rows.columns import Columns, Wishes, find_columns
from whet.recipes.text.rows.labels import as_list, written
from whet.recipes.text.rows.row import Fault, Row, Source
from whet.recipes.text.rows.sources import column_names, read_rows

_MOST_NAMES = 1_000
"""Of columns: JSON rows may bring new ones for ever."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A text, its labels and where it stands; or the fault of a row that holds none."""

    row: Row
    text: str
    pair: str | None
    labels: tuple[str, ...]
    """As written: one, or the entries of a list; none where the cell is empty."""
    is_list: bool
    """Whether the label cell is a list, so that none and several are meant."""
    group: str | None
    number: int = 0
    """Of several samples in one row: which."""

    @property
    def fault(self) -> Fault | None:
        """What left the row unreadable; None for one that can be used."""
        return None if self.row.fault is None or self.row.fault.is_whole else self.row.fault


class SampleReader:
    """Reads the samples of a source, and tells its columns once the first row is there."""

    def __init__(self, source: Source, wishes: Wishes) -> None:
        self.source = source
        self.columns: Columns | None = None
        self._wishes = Wishes(group=wishes.group) if source.form == "class folders" else wishes
        self._names: dict[str, None] = {}

    def __iter__(self) -> Iterator[Sample]:
        for row in read_rows(self.source):
            if row.cells and (self.columns is None or self.columns.label is None):
                self._look_for_columns(row)
            if self.columns is None or not row.cells:
                yield Sample(row=row, text="", pair=None, labels=(), is_list=False, group=None)
            else:
                yield from _samples(row, self.columns, where=self.where(row))

    def _look_for_columns(self, row: Row) -> None:
        """Those of the first rows; a label that only a later row brings is one all the same."""
        names = self._names | dict.fromkeys(row.cells if self._names else column_names(self.source))
        if len(names) == len(self._names) or len(self._names) > _MOST_NAMES:
            return
        self._names = names
        # Test rows may come without labels, as contests give them out.
        needs_label = self.source.part != "test"
        if self.columns is None:
            self.columns = find_columns(names, self._wishes, path=self.source.path, needs_label=needs_label)
            return
        wishes = self._wishes.model_copy(update={"text": self.columns.text})
        found = find_columns(names, wishes, path=self.source.path, needs_label=False)
        self.columns = self.columns.model_copy(update={"label": found.label})

    def where(self, row: Row) -> str:
        """The place of a row, as editors understand it."""
        return f"{self.source.path}/{row.name}" if row.name else f"{self.source.path}:{row.line}"


def _samples(row: Row, columns: Columns, *, where: str) -> Iterator[Sample]:
    cells = row.cells
    text, label = cells.get(columns.text), None if columns.label is None else cells.get(columns.label)
    group = None if columns.group is None else written(cells.get(columns.group)) or None
    pair = None if columns.pair is None else as_text(cells.get(columns.pair))
    several = as_list(label)
    if isinstance(text, list) and several is not None and len(text) == len(several):
        # Sentences of one document, each with its label: they belong together when rows are split.
        together = group or where
        for number, (sentence, name) in enumerate(zip(text, several, strict=True)):
            yield Sample(
                row=row,
                text=as_text(sentence),
                pair=pair,
                labels=(name,) if name else (),
                is_list=False,
                group=together,
                number=number + 1,
            )
        return
    names = [written(label)] if several is None else several
    yield Sample(
        row=row,
        text=as_text(text),
        pair=pair,
        labels=tuple(name for name in names if name),
        is_list=several is not None,
        group=group,
    )


def as_text(cell: Any) -> str:
    """A cell as text; nothing for one that is missing."""
    return cell if isinstance(cell, str) else "" if cell is None or cell != cell else str(cell)
