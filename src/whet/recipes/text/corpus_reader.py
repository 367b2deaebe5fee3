"""Load a corpus from files: read the rows, split the labels and hold out missing splits."""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from whet.base.errors import UsageError
from whet.recipes.text.config import TextConfig
from whet.recipes.text.corpus import Corpus, Examples, split
from whet.recipes.text.data_report.inspector import quick_findings
from whet.recipes.text.data_report.report import serious_lines
from whet.recipes.text.embedded import read_docstrings
from whet.recipes.text.readers.rows import TextSource
from whet.recipes.text.readers.samples import (
    AUTO,
    ColumnOverrides,
    SampleReader,
    TextSample,
    detect_separator,
    split_label,
    validate_separator,
)
from whet.recipes.text.readers.sources import find_sources


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedCorpus:
    """A corpus, and notes about how its files were interpreted."""

    corpus: Corpus
    notes: tuple[str, ...] = ()


class _LabeledText(NamedTuple):
    """A text with the names of its classes."""

    text: str
    pair: str | None
    labels: tuple[str, ...]
    group: str | None


@dataclass(frozen=True, kw_only=True)
class _LoadedRows:
    """The rows of all files by split."""

    where: str
    splits: dict[str, list[_LabeledText]] = field(default_factory=lambda: {"train": [], "val": [], "test": []})
    formats: list[str] = field(default_factory=list)
    """The format and columns of each file."""
    notes: list[str] = field(default_factory=list)


def load_corpus(config: TextConfig) -> LoadedCorpus:
    """Load the corpus of `data` and `data_paths`, with notes about its format and its serious defects."""
    if not config.paths:
        return LoadedCorpus(corpus=read_docstrings())
    loaded = read_files(
        *config.paths, overrides=config.column_overrides, separator=config.label_separator, split_seed=config.split_seed
    )
    where = " or ".join(shlex.quote(str(path)) for path in config.paths[:3])
    warnings = serious_lines(quick_findings(loaded.corpus), where=where)
    return LoadedCorpus(corpus=loaded.corpus, notes=(*loaded.notes, *warnings))


def read_files(
    *paths: Path, overrides: ColumnOverrides | None = None, separator: str | None = AUTO, split_seed: int = 0
) -> LoadedCorpus:
    """Read the rows of all files and folders as one corpus. Missing splits are held out from the training rows."""
    rows = _LoadedRows(where=", ".join(map(str, paths)))
    has_lists = [
        _read_source(source, overrides or ColumnOverrides(), rows) for path in paths for source in find_sources(path)
    ]
    is_multi = _split_labels(rows, separator=separator, has_lists=any(has_lists))
    # The training rows define the classes. Held-out labels must be among them.
    splits = rows.splits
    classes = _class_names(splits["train"], held_out=[*splits["val"], *splits["test"]], where=rows.where)
    train, val, test = (_to_examples(splits[name], classes=classes, is_multi=is_multi) for name in splits)
    groups = [row.group for row in splits["train"]]
    corpus = _with_missing_splits(
        train, val=val, test=test, classes=classes, where=rows.where, seed=split_seed, groups=groups
    )
    return LoadedCorpus(corpus=corpus, notes=(*_notes(rows, corpus, is_multi=is_multi), *rows.notes))


# --- rows -------------------------------------------------------------------------------------------------------------


def _read_source(source: TextSource, overrides: ColumnOverrides, loaded: _LoadedRows) -> bool:
    """Add the rows of a source to its split, and return whether its labels are lists."""
    reader = SampleReader(source, overrides)
    rows: list[_LabeledText] = []
    first_unlabeled: UsageError | None = None
    has_lists = False
    for sample in reader:
        _check_readable(sample, source)
        columns = reader.columns
        assert columns is not None
        where = f"{source.path}, row {sample.row.line}"
        text, pair = sample.text.strip(), None if sample.pair is None else sample.pair.strip()
        if not text:
            raise _empty_cell_error(columns.text, sample, where=where)
        if pair == "":
            raise _empty_cell_error(columns.pair or "", sample, where=where)
        if not sample.labels and not sample.is_list:
            unlabeled = _empty_cell_error(columns.label or "label", sample, where=where)
            if source.split != "test":
                raise unlabeled
            first_unlabeled = first_unlabeled or unlabeled
        has_lists = has_lists or sample.is_list
        rows.append(_LabeledText(text, pair, sample.labels, sample.group))
    if not rows:
        raise UsageError(f"{source.path} has no rows", got="only a header", try_="rows with a text and a label")
    if first_unlabeled is not None:
        # Skip a test file without any labels, as published by competitions. A partly labeled file is an error.
        if any(row.labels for row in rows):
            raise first_unlabeled
        loaded.notes.append(f"{source.path.name} has no labels and is skipped")
        return False
    assert reader.columns is not None
    loaded.splits[source.split or "train"] += rows
    loaded.formats.append(f"{source.format}; {reader.columns.describe()}")
    return has_lists


def _check_readable(sample: TextSample, source: TextSource) -> None:
    error = sample.error
    if error is None:
        return
    where = f"{source.path}" if error.kind == "not-utf8" else f"row {sample.row.line} of {source.path}"
    raise UsageError(f"{where} {error.what}", got=error.got, try_=error.try_)


def _empty_cell_error(column: str, sample: TextSample, *, where: str) -> UsageError:
    return UsageError(
        f"an empty {column} in {where}",
        got=repr(sample.row.cells.get(column)),
        try_="fill it in, or remove the row; whet data text FILE --fix --out OUT removes such rows",
    )


# --- labels -----------------------------------------------------------------------------------------------------------


def _split_labels(loaded: _LoadedRows, *, separator: str | None, has_lists: bool) -> bool:
    """Split labels that name several classes, in place, and return whether the corpus is multi-label."""
    rows = [row for part in loaded.splits.values() for row in part]
    separator = validate_separator(separator)
    if has_lists:
        return any(len(row.labels) != 1 for row in rows)
    if separator == AUTO:
        separator = detect_separator(row.labels[0] for row in rows)
    if separator is None:
        return False
    for part in loaded.splits.values():
        part[:] = [row._replace(labels=tuple(split_label(row.labels[0], separator))) for row in part]
    loaded.notes.append(f"labels are separated by {separator!r} (label_separator=null disables this)")
    return True


def _class_names(train: list[_LabeledText], *, held_out: list[_LabeledText], where: str) -> list[str]:
    """Return the classes in alphabetical order. Each class needs at least two training rows."""
    counts = Counter(label for row in train for label in row.labels)
    known = ", ".join(f"{label} ({count})" for label, count in counts.most_common(8))
    for label in sorted({*counts, *(label for row in held_out for label in row.labels)}):
        if counts[label] < 2:
            times = "once" if counts[label] else "never"
            raise UsageError(
                f"the label {label!r} occurs {times} in the training rows of {where}",
                got=known,
                try_="more rows of it, or remove it; it may be a header or a typo (whet data text FILE)",
            )
    if len(counts) < 2:
        raise UsageError(
            f"all rows of {where} have the same label",
            got=known,
            try_="rows of at least two classes, or another column",
        )
    return sorted(counts)


def _to_examples(rows: list[_LabeledText], *, classes: Sequence[str], is_multi: bool) -> Examples:
    index = {name: number for number, name in enumerate(classes)}
    label_sets = tuple(tuple(sorted({index[label] for label in row.labels})) for row in rows)
    has_pairs = any(row.pair is not None for row in rows)
    return Examples(
        texts=tuple(row.text for row in rows),
        labels=tuple(labels[0] if labels else -1 for labels in label_sets),
        pairs=tuple(row.pair or "" for row in rows) if has_pairs else (),
        label_sets=label_sets if is_multi else (),
    )


# --- splits -----------------------------------------------------------------------------------------------------------


def _with_missing_splits(
    train: Examples,
    *,
    val: Examples,
    test: Examples,
    classes: Sequence[str],
    where: str,
    seed: int,
    groups: Sequence[str | None],
) -> Corpus:
    """Hold out training rows for the splits that the files do not provide."""
    if val and test:
        return Corpus(classes=tuple(classes), train=train, val=val, test=test)
    corpus = split(train, classes=classes, seed=seed, groups=groups)
    # Use a given split unchanged: rows that `split` held out for it return to the training rows.
    if val:
        corpus = Corpus(classes=corpus.classes, train=corpus.train.joined(corpus.val), val=val, test=corpus.test)
    elif test:
        corpus = Corpus(classes=corpus.classes, train=corpus.train.joined(corpus.test), val=corpus.val, test=test)
    for name, part in (("validation", corpus.val), ("test", corpus.test)):
        if not part:
            raise UsageError(
                f"too few rows to hold out a {name} split",
                got=f"{len(train)} rows of {len(classes)} classes in {where}",
                try_="at least ten different texts (or groups) of a class, or a folder with train, val and test files",
            )
    return corpus


def _notes(loaded: _LoadedRows, corpus: Corpus, *, is_multi: bool) -> list[str]:
    sizes = [len(rows) for rows in loaded.splits.values() if rows]
    formats = " and ".join(dict.fromkeys(loaded.formats))
    line = f"read {' + '.join(f'{size:,}' for size in sizes)} rows of {formats}, {len(corpus.classes)} classes"
    notes = [f"{line} (multi-label)" if is_multi else line]
    if len(sizes) < 3:
        counts = f"{len(corpus.train):,} + {len(corpus.val):,} + {len(corpus.test):,}"
        notes.append(f"split into {counts} (train, val, test); equal texts and groups stay in one split")
    return notes
