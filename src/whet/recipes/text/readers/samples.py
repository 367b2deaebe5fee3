"""Convert rows to labeled texts: choose the columns and parse the labels."""

import ast
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from whet.base.errors import UsageError, closest_match
from whet.recipes.text.readers.rows import RowError, TextRow, TextSource
from whet.recipes.text.readers.sources import column_names, read_rows

TEXT_NAMES = (
    *("text", "sentence", "content", "review", "comment", "message", "body", "document", "abstract", "string"),
    *("utterance", "tweet", "headline", "title", "question", "query", "post", "description", "texts", "sentences"),
)
LABEL_NAMES = (
    *("label", "category", "class", "target", "intent", "sentiment", "topic", "tag", "labels", "categories", "classes"),
    *("intents", "topics", "tags", "genre", "genres", "relation", "stance", "emotion", "gold_label", "label_text"),
)
PAIR_NAMES = (
    *(("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("text1", "text2")),
    *(("text_a", "text_b"), ("sentence_a", "sentence_b"), ("text", "text_pair"), ("question", "sentence")),
)
_MAX_COLUMNS = 1_000
"""The number of keys at which the search for a label column stops: every JSON row may introduce new keys."""

AUTO = "auto"
SEPARATORS = ("|", ";", ",")
# Longer texts are not parsed as lists: literal_eval is slow and may exhaust the stack.
_MAX_LIST_LENGTH = 10_000


# --- columns ----------------------------------------------------------------------------------------------------------


class ColumnOverrides(BaseModel):
    """The columns named by the user. If None, text, label and pair are guessed, and there is no group."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True)

    text: str | None = None
    label: str | None = None
    pair: str | None = None
    group: str | None = None


class ColumnNames(BaseModel):
    """The columns to read, spelled as in the file."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True)

    text: str
    label: str | None
    """The label column; None for unlabeled rows, such as the test rows of a competition."""
    pair: str | None = None
    group: str | None = None

    def describe(self) -> str:
        """Format the columns for a message.

        >>> ColumnNames(text="string", label="label").describe()
        'text = string, label = label'
        """
        columns = (("text", self.text), ("pair", self.pair), ("label", self.label), ("group", self.group))
        return ", ".join(f"{role} = {name}" for role, name in columns if name is not None)


def find_columns(
    names: Iterable[str], overrides: ColumnOverrides, *, path: Path, needs_label: bool = True
) -> ColumnNames:
    """Return the columns of a file: those named by the user, otherwise those with common names."""
    spelling: dict[str, str] = {}
    for name in names:
        spelling.setdefault(str(name).strip().lower(), str(name))
    text = _named_column(overrides.text, "text", spelling, path=path)
    label = _named_column(overrides.label, "label", spelling, path=path, is_required=needs_label)
    pair = _named_column(overrides.pair, "pair", spelling, path=path)
    group = _named_column(overrides.group, "group", spelling, path=path)
    if text is None and pair is None:
        text, pair = next(
            ((spelling[a], spelling[b]) for a, b in PAIR_NAMES if a in spelling and b in spelling), (None, None)
        )
    taken = {label, pair, group}
    text = text or _guess_column("text", TEXT_NAMES, spelling, taken=taken, path=path)
    assert text is not None
    label = label or _guess_column(
        "label", LABEL_NAMES, spelling, taken={text, pair, group}, path=path, is_required=needs_label
    )
    return ColumnNames(text=text, label=label, pair=pair, group=group)


def _named_column(
    name: str | None, role: str, spelling: dict[str, str], *, path: Path, is_required: bool = True
) -> str | None:
    if name is None:
        return None
    column = spelling.get(name.strip().lower())
    if column is None and is_required:
        suggestion = closest_match(name.lower(), spelling)
        raise UsageError(
            f"{path} has no column {name!r}",
            got="columns " + ", ".join(spelling.values())[:200],
            try_=f"{role}_column={spelling[suggestion] if suggestion else 'NAME'}",
        )
    return column


def _guess_column(
    role: str,
    names: tuple[str, ...],
    spelling: dict[str, str],
    *,
    taken: set[str | None],
    path: Path,
    is_required: bool = True,
) -> str | None:
    column = next((spelling[name] for name in names if name in spelling and spelling[name] not in taken), None)
    if column is None and is_required:
        raise UsageError(
            f"{path} has no {role} column",
            got="columns " + ", ".join(spelling.values())[:200],
            try_=f"{role}_column=NAME, or name it {role!r} (also recognized: {', '.join(names[1:])})",
        )
    return column


# --- labels -----------------------------------------------------------------------------------------------------------


def parse_label_list(cell: Any) -> list[str] | None:
    """Return the labels of a cell that is a list, or a JSON or Python list as text. Return None for any other cell.

    >>> parse_label_list(["a", "b"]), parse_label_list('["a", "b"]'), parse_label_list("['a', 'b']")
    (['a', 'b'], ['a', 'b'], ['a', 'b'])
    >>> parse_label_list("a|b") is None
    True
    """
    if isinstance(cell, str):
        text = cell.strip()
        if not (text.startswith("[") and text.endswith("]")) or len(text) > _MAX_LIST_LENGTH:
            return None
        try:
            cell = json.loads(text)
        except (ValueError, RecursionError):
            try:
                # Parse a Python list, as written by pandas. literal_eval accepts only literals.
                cell = ast.literal_eval(text)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                return None
    return [label_text(each) for each in cell] if isinstance(cell, list | tuple) else None


def label_text(value: Any) -> str:
    """Convert a value to a label. 1.0 becomes "1", because tables with missing values store integers as floats.

    >>> label_text(" a "), label_text(1.0), label_text(None), label_text(3)
    ('a', '1', '', '3')
    """
    if value is None:
        return ""
    if isinstance(value, float):
        return "" if value != value else f"{value:g}"
    return str(value).strip()


def split_label(label: str, separator: str) -> list[str]:
    """Split a label into the names that it contains.

    >>> split_label("a | b|", "|")
    ['a', 'b']
    """
    return [name for piece in label.split(separator) if (name := piece.strip())]


def detect_separator(labels: Iterable[str]) -> str | None:
    """Return the separator of multi-label cells, or None if no separator is likely.

    A separator is likely if there are fewer distinct names than distinct cells.

    >>> detect_separator(["toxic|insult", "toxic", "insult", "threat", "toxic|threat"])
    '|'
    >>> detect_separator(["History, ancient", "History, modern", "Art"]) is None
    True
    """
    distinct = set(labels)
    for separator in SEPARATORS:
        if not any(separator in label for label in distinct):
            continue
        names = {name for label in distinct for name in split_label(label, separator)}
        num_alone = sum(name in distinct for name in names)
        # Commas also occur inside labels such as "Smith, John" and "Smith, Jane". Require most names to occur alone.
        if len(names) < len(distinct) and (separator != "," or 2 * num_alone >= len(names)):
            return separator
    return None


def validate_separator(separator: str | None) -> str | None:
    """Return the separator, or raise an error if it is empty."""
    if separator == "":
        raise UsageError("label_separator is empty", got="''", try_="label_separator='|', or null for none")
    return separator


# --- samples ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSample:
    """A text with its labels and its row. If the row is unusable, text and labels are empty."""

    row: TextRow
    text: str
    pair: str | None
    labels: tuple[str, ...]
    """The labels before any splitting: one, or the entries of a list; none if the cell is empty."""
    is_list: bool
    """Whether the label cell is a list, which may be empty."""
    group: str | None
    number: int = 0
    """The number of the sample within its row, from 1; 0 if the row has a single sample."""

    @property
    def error(self) -> RowError | None:
        """The error that makes the row unusable, or None."""
        return None if self.row.error is None or self.row.error.is_usable else self.row.error


class SampleReader:
    """Iterates over the samples of a source. `columns` is set once the first row has been read."""

    def __init__(self, source: TextSource, overrides: ColumnOverrides) -> None:
        self.source = source
        self.columns: ColumnNames | None = None
        self._overrides = ColumnOverrides(group=overrides.group) if source.format == "class folders" else overrides
        self._names: dict[str, None] = {}

    def __iter__(self) -> Iterator[TextSample]:
        for row in read_rows(self.source):
            if row.cells and (self.columns is None or self.columns.label is None):
                self._find_columns(row)
            if self.columns is None or not row.cells:
                yield TextSample(row=row, text="", pair=None, labels=(), is_list=False, group=None)
            else:
                yield from _samples(row, self.columns, where=self.where(row))

    def where(self, row: TextRow) -> str:
        """Return the location of a row as PATH:LINE, which editors can open."""
        return f"{self.source.path}/{row.name}" if row.name else f"{self.source.path}:{row.line}"

    def _find_columns(self, row: TextRow) -> None:
        """Determine the columns from the first rows. In JSON, the label column may appear in a later row."""
        # The first call examines several rows (`column_names`), later calls only the given row.
        names = self._names | dict.fromkeys(row.cells if self._names else column_names(self.source))
        if len(names) == len(self._names) or len(self._names) > _MAX_COLUMNS:
            return
        self._names = names
        # Test rows may have no labels, as in the files of a competition.
        needs_label = self.source.split != "test"
        if self.columns is None:
            self.columns = find_columns(names, self._overrides, path=self.source.path, needs_label=needs_label)
            return
        overrides = self._overrides.model_copy(update={"text": self.columns.text})
        label = find_columns(names, overrides, path=self.source.path, needs_label=False).label
        self.columns = self.columns.model_copy(update={"label": label})


def _samples(row: TextRow, columns: ColumnNames, *, where: str) -> Iterator[TextSample]:
    cells = row.cells
    text, label = cells.get(columns.text), None if columns.label is None else cells.get(columns.label)
    group = None if columns.group is None else label_text(cells.get(columns.group)) or None
    pair = None if columns.pair is None else cell_text(cells.get(columns.pair))
    listed = parse_label_list(label)
    if isinstance(text, list) and listed is not None and len(text) == len(listed):
        # A document with one label per sentence. Use the document as the group, so that its sentences stay together.
        for number, (sentence, name) in enumerate(zip(text, listed, strict=True), start=1):
            yield TextSample(
                row=row,
                text=cell_text(sentence),
                pair=pair,
                labels=(name,) if name else (),
                is_list=False,
                group=group or where,
                number=number,
            )
        return
    names = [label_text(label)] if listed is None else listed
    yield TextSample(
        row=row,
        text=cell_text(text),
        pair=pair,
        labels=tuple(name for name in names if name),
        is_list=listed is not None,
        group=group,
    )


def cell_text(cell: Any) -> str:
    """Return a cell as text; empty for a missing value."""
    return cell if isinstance(cell, str) else "" if cell is None or cell != cell else str(cell)
