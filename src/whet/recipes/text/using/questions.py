"""Which texts does a file ask about? Rows of a table, JSON lines, or one text on each line. No torch."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from whet.base.errors import UsageError
from whet.recipes.text.rows.columns import Wishes, find_columns
from whet.recipes.text.rows.delimited import read_header
from whet.recipes.text.rows.lines import read_lines
from whet.recipes.text.rows.row import Fault, Source
from whet.recipes.text.rows.samples import Sample, SampleReader
from whet.recipes.text.rows.sources import column_names, find_sources

_TABLE_ENDINGS = (".csv", ".tsv", ".tab")
_LONGEST = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A text to be judged, or the fault of a row that holds none."""

    row: str
    """The line it begins in, counted from 1; `12.3` for the third text of one row."""
    text: str = ""
    pair: str | None = None
    labels: tuple[str, ...] | None = None
    """What the file says that it is; None where it says nothing."""
    fault: str | None = None


class Questions:
    """The questions of a file, in its order; `told` says how it was understood once the first was read."""

    def __init__(self, path: Path, wishes: Wishes, *, usual: Wishes, has_pairs: bool | None) -> None:
        """`wishes` are columns that you name now; `usual` those of the training, taken where the file has them."""
        if path.is_dir():
            raise UsageError("whet predict reads a file", got=f"{path} is a folder", try_="one of the files in it")
        (source,) = find_sources(path)
        # Rows to be judged need no label, as those of a test part.
        self._source = replace(source, part="test")
        self._is_plain = _is_plain(self._source, wishes, usual)
        self._has_pairs = has_pairs
        self._wishes = wishes if self._is_plain else self._columns_of(wishes, usual)
        self.is_json = source.form == "JSON lines"
        self.told: str = "plain text, one on each line" if self._is_plain else source.form
        if self._is_plain and has_pairs:
            raise _no_pairs(path, "plain text")

    def __iter__(self) -> Iterator[Question]:
        if self._is_plain:
            yield from _plain(self._source)
            return
        reader = SampleReader(self._source, self._wishes)
        for sample in reader:
            if reader.columns is not None:
                self.told = f"{self._source.form}; {reader.columns.told()}"
            has_label = reader.columns is not None and reader.columns.label is not None
            yield _question(sample, has_label=has_label)

    def _columns_of(self, wishes: Wishes, usual: Wishes) -> Wishes:
        source = self._source
        names = column_names(source)
        both = _there(names, usual).model_copy(update=wishes.model_dump(exclude_none=True))
        if names:
            try:
                found = find_columns(names, both, path=source.path, needs_label=wishes.label is not None)
            except UsageError as error:
                # There the columns are keys, here they are options.
                try_ = re.sub(r"^(\w+)_column=", r"--\1-column ", error.try_ or "")
                raise UsageError(error.what, got=error.got, try_=try_) from None
            self._refuse_other_kind(found.pair)
        return both

    def _refuse_other_kind(self, pair: str | None) -> None:
        """A model of pairs needs both halves, and another one would overlook the second."""
        if self._has_pairs and pair is None:
            raise _no_pairs(self._source.path, "no column for the second text")
        if self._has_pairs is False and pair is not None:
            raise UsageError(
                "the run was trained on single texts",
                got=f"{self._source.path} has pairs, the second in {pair!r}",
                try_="--text-column NAME for the one to be judged",
            )


def _no_pairs(path: Path, got: str) -> UsageError:
    return UsageError(
        "the run was trained on pairs of texts", got=f"{path}: {got}", try_="a table, and --pair-column NAME"
    )


def _is_plain(source: Source, wishes: Wishes, usual: Wishes) -> bool:
    """Whether a file that might be a table is none: no column of its first line is known as a text."""
    if source.form not in ("CSV", "TSV") or source.path.suffix.lower() in _TABLE_ENDINGS or wishes.text is not None:
        return False
    try:
        _, names = read_header(source)
        find_columns(names, _there(names, usual), path=source.path, needs_label=False)
    except UsageError:
        return True
    return False


def _there(names: list[str], usual: Wishes) -> Wishes:
    """The usual columns, as far as there are such."""
    known = {name.strip().lower() for name in names}
    said = {what: name for what, name in usual.model_dump(exclude_none=True).items() if name.strip().lower() in known}
    return Wishes(**said)


def _plain(source: Source) -> Iterator[Question]:
    for line in read_lines(source):
        if line.fault is not None:
            yield Question(row=str(line.number), fault=_words(line.fault))
        elif line.text.strip():
            yield Question(row=str(line.number), text=line.text.strip())


def _question(sample: Sample, *, has_label: bool) -> Question:
    row = f"{sample.row.line}.{sample.number}" if sample.number else str(sample.row.line)
    if sample.fault is not None:
        return Question(row=row, fault=_words(sample.fault))
    text, pair = sample.text.strip(), None if sample.pair is None else sample.pair.strip()
    if not text or pair == "":
        return Question(row=row, fault="has an empty text")
    if not _is_writable(text) or not _is_writable(pair or ""):
        return Question(row=row, fault="has half a character (a lone surrogate)")
    labels = sample.labels if has_label and (sample.labels or sample.is_list) else None
    return Question(row=row, text=text, pair=pair, labels=labels)


def _is_writable(text: str) -> bool:
    """JSON may name halves of characters, which are no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _words(fault: Fault) -> str:
    return f"{fault.what}: {fault.got}"[:_LONGEST]
