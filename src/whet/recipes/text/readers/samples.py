"""Turn rows into labeled texts: find the columns, parse the labels."""

import ast
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


class ColumnOverrides(BaseModel):
    """The columns that you name; None is guessed, and pairs and groups without a name are none."""

    model_config = ConfigDict(frozen=True)

    text: str | None = None
    label: str | None = None
    pair: str | None = None
    group: str | None = None


class ColumnNames(BaseModel):
    """Names of columns, as the file spells them."""

    model_config = ConfigDict(frozen=True)

    text: str
    label: str | None
    """None where the rows have no label, as test rows of a contest."""
    pair: str | None = None
    group: str | None = None

    def told(self) -> str:
        """What was understood, in words.

        >>> Columns(text="string", label="label").told()
        'text = string, label = label'
        """
        named = (("text", self.text), ("pair", self.pair), ("label", self.label), ("group", self.group))
        return ", ".join(f"{what} = {name}" for what, name in named if name is not None)


def find_columns(
    names: Iterable[str], overrides: ColumnOverrides, *, path: Path, needs_label: bool = True
) -> ColumnNames:
    """The columns of a file with these names."""
    spelled: dict[str, str] = {}
    for name in names:
        spelled.setdefault(str(name).strip().lower(), str(name))
    text = _named_column(overrides.text, "text", spelled, path=path)
    label = _named_column(overrides.label, "label", spelled, path=path, is_needed=needs_label)
    pair = _named_column(overrides.pair, "pair", spelled, path=path)
    group = _named_column(overrides.group, "group", spelled, path=path)
    if text is None and pair is None:
        text, pair = next(
            ((spelled[a], spelled[b]) for a, b in PAIR_NAMES if a in spelled and b in spelled), (None, None)
        )
    taken = {label, pair, group}
    text = text or _guess_column("text", TEXT_NAMES, spelled, taken=taken, path=path)
    assert text is not None
    label = label or _guess_column(
        "label", LABEL_NAMES, spelled, taken={text, pair, group}, path=path, is_needed=needs_label
    )
    return ColumnNames(text=text, label=label, pair=pair, group=group)


def _named_column(
    wish: str | None, what: str, spelled: dict[str, str], *, path: Path, is_needed: bool = True
) -> str | None:
    if wish is None:
        return None
    found = spelled.get(wish.strip().lower())
    if found is None and is_needed:
        meant = closest_match(wish.lower(), spelled)
        raise UsageError(
            f"{path} has no column {wish!r}",
            got="columns " + ", ".join(spelled.values())[:200],
            try_=f"{what}_column={spelled[meant] if meant else 'NAME'}",
        )
    return found


def _guess_column(
    what: str,
    names: tuple[str, ...],
    spelled: dict[str, str],
    *,
    taken: set[str | None],
    path: Path,
    is_needed: bool = True,
) -> str | None:
    found = next((spelled[name] for name in names if name in spelled and spelled[name] not in taken), None)
    if found is None and is_needed:
        raise UsageError(
            f"{path} has no {what} column",
            got="columns " + ", ".join(spelled.values())[:200],
            try_=f"{what}_column=NAME, or name it {what!r} (also understood: {', '.join(names[1:])})",
        )
    return found


AUTO = "auto"
SEPARATORS = ("|", ";", ",")
_LONGEST_LIST = 10_000


def parse_label_list(cell: Any) -> list[str] | None:
    """The labels of a cell that is a list, or a text that spells one; None for any other.

    >>> as_list(["a", "b"]), as_list('["a", "b"]'), as_list("['a', 'b']"), as_list("a|b")
    (['a', 'b'], ['a', 'b'], ['a', 'b'], None)
    """
    if isinstance(cell, str):
        text = cell.strip()
        if not (text.startswith("[") and text.endswith("]")) or len(text) > _LONGEST_LIST:
            return None
        try:
            cell = json.loads(text)
        except (ValueError, RecursionError):
            try:
                # Python's spelling, as programs write it; names, numbers and brackets only.
                cell = ast.literal_eval(text)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                return None
    return [label_text(each) for each in cell] if isinstance(cell, list | tuple) else None


def label_text(value: Any) -> str:
    """A value as a label is written; 1.0 is what a table makes of 1.

    >>> written(" a "), written(1.0), written(None), written(3)
    ('a', '1', '', '3')
    """
    if value is None:
        return ""
    if isinstance(value, float):
        return "" if value != value else f"{value:g}"
    return str(value).strip()


def split_label(label: str, separator: str) -> list[str]:
    """The names in a label.

    >>> split_label("a | b|", "|")
    ['a', 'b']
    """
    return [name for piece in label.split(separator) if (name := piece.strip())]


def detect_separator(labels: Iterable[str]) -> str | None:
    """The sign that joins names in these labels, where that is clear: the names are fewer than what they form.

    >>> clear_separator(["toxic|insult", "toxic", "insult", "threat", "toxic|threat"])
    '|'
    >>> clear_separator(["History, ancient", "History, modern", "Art"]) is None
    True
    """
    whole = set(labels)
    for separator in SEPARATORS:
        if not any(separator in label for label in whole):
            continue
        pieces = {piece for label in whole for piece in split_label(label, separator)}
        alone = sum(piece in whole for piece in pieces)
        # "Smith, John" and "Smith, Jane" share pieces too: with commas most names must also stand alone.
        if len(pieces) < len(whole) and (separator != "," or 2 * alone >= len(pieces)):
            return separator
    return None


def validate_separator(wish: str | None) -> str | None:
    """`label_separator` as it was given; an empty one would cut letters."""
    if wish == "":
        raise UsageError("label_separator is empty", got="''", try_="label_separator='|', or null for none")
    return wish


_MAX_COLUMNS = 1_000
"""Of columns: JSON rows may bring new ones for ever."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSample:
    """A text, its labels and where it stands; or the fault of a row that holds none."""

    row: TextRow
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
    def fault(self) -> RowError | None:
        """What left the row unreadable; None for one that can be used."""
        return None if self.row.fault is None or self.row.fault.is_whole else self.row.fault


class SampleReader:
    """Reads the samples of a source, and tells its columns once the first row is there."""

    def __init__(self, source: TextSource, overrides: ColumnOverrides) -> None:
        self.source = source
        self.columns: ColumnNames | None = None
        self._wishes = ColumnOverrides(group=overrides.group) if source.form == "class folders" else overrides
        self._names: dict[str, None] = {}

    def __iter__(self) -> Iterator[TextSample]:
        for row in read_rows(self.source):
            if row.cells and (self.columns is None or self.columns.label is None):
                self._look_for_columns(row)
            if self.columns is None or not row.cells:
                yield TextSample(row=row, text="", pair=None, labels=(), is_list=False, group=None)
            else:
                yield from _samples(row, self.columns, where=self.where(row))

    def _look_for_columns(self, row: TextRow) -> None:
        """Those of the first rows; a label that only a later row brings is one all the same."""
        names = self._names | dict.fromkeys(row.cells if self._names else column_names(self.source))
        if len(names) == len(self._names) or len(self._names) > _MAX_COLUMNS:
            return
        self._names = names
        # Test rows may come without labels, as contests give them out.
        needs_label = self.source.part != "test"
        if self.columns is None:
            self.columns = find_columns(names, self._wishes, path=self.source.path, needs_label=needs_label)
            return
        overrides = self._wishes.model_copy(update={"text": self.columns.text})
        found = find_columns(names, overrides, path=self.source.path, needs_label=False)
        self.columns = self.columns.model_copy(update={"label": found.label})

    def where(self, row: TextRow) -> str:
        """The place of a row, as editors understand it."""
        return f"{self.source.path}/{row.name}" if row.name else f"{self.source.path}:{row.line}"


def _samples(row: TextRow, columns: ColumnNames, *, where: str) -> Iterator[TextSample]:
    cells = row.cells
    text, label = cells.get(columns.text), None if columns.label is None else cells.get(columns.label)
    group = None if columns.group is None else label_text(cells.get(columns.group)) or None
    pair = None if columns.pair is None else cell_text(cells.get(columns.pair))
    several = parse_label_list(label)
    if isinstance(text, list) and several is not None and len(text) == len(several):
        # Sentences of one document, each with its label: they belong together when rows are split.
        together = group or where
        for number, (sentence, name) in enumerate(zip(text, several, strict=True)):
            yield TextSample(
                row=row,
                text=cell_text(sentence),
                pair=pair,
                labels=(name,) if name else (),
                is_list=False,
                group=together,
                number=number + 1,
            )
        return
    names = [label_text(label)] if several is None else several
    yield TextSample(
        row=row,
        text=cell_text(text),
        pair=pair,
        labels=tuple(name for name in names if name),
        is_list=several is not None,
        group=group,
    )


def cell_text(cell: Any) -> str:
    """A cell as text; nothing for one that is missing."""
    return cell if isinstance(cell, str) else "" if cell is None or cell != cell else str(cell)
