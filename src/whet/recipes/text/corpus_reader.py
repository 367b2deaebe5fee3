"""Load a corpus from files: rows, labels, missing splits, and notes about what was understood."""

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


class _LabeledText(NamedTuple):
    """A text with the names of its classes."""

    text: str
    pair: str | None
    labels: tuple[str, ...]
    group: str | None


@dataclass(frozen=True, kw_only=True)
class _LoadedRows:
    """What was found on disk, by part."""

    where: str
    parts: dict[str, list[_LabeledText]] = field(default_factory=lambda: {"train": [], "val": [], "test": []})
    told: list[str] = field(default_factory=list)
    """Forms and columns, in words."""
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedCorpus:
    """A corpus, and what was understood on the way to it, in a few lines."""

    corpus: Corpus
    told: tuple[str, ...] = ()


def read_table(
    *paths: Path, overrides: ColumnOverrides | None = None, separator: str | None = AUTO, split_seed: int = 0
) -> Corpus:
    """The rows of all files and folders as one corpus; what a folder does not bring is cut from its training rows."""
    return read_texts(*paths, overrides=overrides, separator=separator, split_seed=split_seed).corpus


def read_texts(
    *paths: Path, overrides: ColumnOverrides | None = None, separator: str | None = AUTO, split_seed: int = 0
) -> LoadedCorpus:
    """The same, with what was understood."""
    read = _LoadedRows(where=", ".join(map(str, paths)))
    is_list = [
        _read_source(source, overrides or ColumnOverrides(), read) for path in paths for source in find_sources(path)
    ]
    is_multi = _split_labels(read, separator=separator, has_lists=any(is_list))
    parts = read.parts
    classes = _class_names(parts["train"], held_out=[*parts["val"], *parts["test"]], where=read.where)
    train, val, test = (_numbered(parts[name], classes=classes, is_multi=is_multi) for name in parts)
    groups = [row.group for row in parts["train"]]
    corpus = _with_missing_splits(
        train, val=val, test=test, classes=classes, where=read.where, seed=split_seed, groups=groups
    )
    return LoadedCorpus(corpus=corpus, told=(*_notes(read, corpus, is_multi=is_multi), *read.left_out))


# --- rows ------------------------------------------------------------------------------------------------------------


def _read_source(source: TextSource, overrides: ColumnOverrides, read: _LoadedRows) -> bool:
    """Adds the rows of a source to its part; whether its labels are lists."""
    reader = SampleReader(source, overrides)
    rows: list[_LabeledText] = []
    first_bare: UsageError | None = None
    has_lists = False
    for sample in reader:
        _raise_row_error(sample, source)
        columns = reader.columns
        assert columns is not None
        where = f"{source.path}, row {sample.row.line}"
        text, pair = sample.text.strip(), None if sample.pair is None else sample.pair.strip()
        if not text:
            raise _empty_cell_error(columns.text, sample, where=where)
        if pair == "":
            raise _empty_cell_error(columns.pair or "", sample, where=where)
        if not sample.labels and not sample.is_list:
            bare = _empty_cell_error(columns.label or "label", sample, where=where)
            if source.part != "test":
                raise bare
            first_bare = first_bare or bare
        has_lists = has_lists or sample.is_list
        rows.append(_LabeledText(text, pair, sample.labels, sample.group))
    if not rows:
        raise UsageError(f"{source.path} is empty", got="a header without rows", try_="rows with a text and a label")
    if first_bare is not None:
        if any(row.labels for row in rows):
            raise first_bare
        read.left_out.append(f"{source.path.name} has no labels, and is left out")
        return False
    assert reader.columns is not None
    read.parts[source.part or "train"] += rows
    read.told.append(f"{source.form}; {reader.columns.told()}")
    return has_lists


def _raise_row_error(sample: TextSample, source: TextSource) -> None:
    fault = sample.fault
    if fault is None:
        return
    at = f"{source.path}" if fault.kind == "not-utf8" else f"row {sample.row.line} of {source.path}"
    raise UsageError(f"{at} {fault.what}", got=fault.got, try_=fault.try_)


def _empty_cell_error(column: str, sample: TextSample, *, where: str) -> UsageError:
    return UsageError(
        f"an empty {column} in {where}",
        got=repr(sample.row.cells.get(column)),
        try_="fill it in, or remove the row; whet data text FILE --fix OUT removes such rows",
    )


# --- labels ----------------------------------------------------------------------------------------------------------


def _split_labels(read: _LoadedRows, *, separator: str | None, has_lists: bool) -> bool:
    """Cuts labels that name several classes, in place; whether a row may have several."""
    rows = [row for part in read.parts.values() for row in part]
    separator = validate_separator(separator)
    if has_lists:
        return any(len(row.labels) != 1 for row in rows)
    if separator == AUTO:
        separator = detect_separator(row.labels[0] for row in rows)
    if separator is None:
        return False
    for part in read.parts.values():
        part[:] = [row._replace(labels=tuple(split_label(row.labels[0], separator))) for row in part]
    read.left_out.append(f"labels are separated by {separator!r} (label_separator=null takes them whole)")
    return True


def _class_names(train: list[_LabeledText], *, held_out: list[_LabeledText], where: str) -> list[str]:
    """The classes in alphabetical order, each seen often enough to be learned."""
    seen = Counter(label for row in train for label in row.labels)
    known = ", ".join(f"{label} ({count})" for label, count in seen.most_common(8))
    for label in sorted({*seen, *(label for row in held_out for label in row.labels)}):
        if seen[label] < 2:
            times = "once" if seen[label] else "never"
            raise UsageError(
                f"the label {label!r} is seen {times} in the training rows of {where}",
                got=known,
                try_="more rows of it, or leave it out; perhaps it is a header or a typing error (whet data text FILE)",
            )
    if len(seen) < 2:
        raise UsageError(
            f"all rows of {where} have the same label",
            got=known,
            try_="rows of at least two classes, or another column",
        )
    return sorted(seen)


def _numbered(rows: list[_LabeledText], *, classes: Sequence[str], is_multi: bool) -> Examples:
    number = {name: index for index, name in enumerate(classes)}
    sets = tuple(tuple(sorted({number[label] for label in row.labels})) for row in rows)
    has_pairs = any(row.pair is not None for row in rows)
    return Examples(
        texts=tuple(row.text for row in rows),
        labels=tuple(labels[0] if labels else -1 for labels in sets),
        pairs=tuple(row.pair or "" for row in rows) if has_pairs else (),
        label_sets=sets if is_multi else (),
    )


# --- parts -----------------------------------------------------------------------------------------------------------


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
    if val and test:
        return Corpus(classes=tuple(classes), train=train, val=val, test=test)
    cut = split(train, classes=classes, seed=seed, groups=groups)
    if val:
        cut = Corpus(classes=cut.classes, train=cut.train.joined(cut.val), val=val, test=cut.test)
    elif test:
        cut = Corpus(classes=cut.classes, train=cut.train.joined(cut.test), val=cut.val, test=test)
    for name, part in (("val", cut.val), ("test", cut.test)):
        if not part:
            raise UsageError(
                f"too few rows to hold a {name} part back",
                got=f"{len(train)} rows of {len(classes)} classes in {where}",
                try_="at least ten different texts (or groups) of a class, or a folder with train, dev and test files",
            )
    return cut


def _notes(read: _LoadedRows, corpus: Corpus, *, is_multi: bool) -> list[str]:
    sizes = [len(rows) for rows in read.parts.values() if rows]
    forms = " and ".join(dict.fromkeys(read.told))
    each = "a text may have several" if is_multi else ""
    line = f"read {' + '.join(f'{size:,}' for size in sizes)} rows of {forms}, {len(corpus.classes)} classes"
    told = [f"{line} ({each})" if each else line]
    if len(sizes) < 3:
        parts = f"{len(corpus.train):,} + {len(corpus.val):,} + {len(corpus.test):,}"
        told.append(f"split into {parts} (train, dev, test); equal texts and groups stay on one side")
    return told


def read_corpus(config: TextConfig) -> Corpus:
    """The corpus behind `data` and `data_paths`."""
    return load_corpus(config).corpus


def load_corpus(config: TextConfig) -> LoadedCorpus:
    """The same, with what was understood and what is wrong with it, in a few lines."""
    paths = [Path(path) for path in (config.data, *config.data_paths) if path is not None]
    if not paths:
        return LoadedCorpus(corpus=read_docstrings())
    read = read_texts(
        *paths, overrides=config.column_overrides, separator=config.label_separator, split_seed=config.split_seed
    )
    where = " or ".join(shlex.quote(str(path)) for path in paths[:3])
    return LoadedCorpus(corpus=read.corpus, told=(*read.told, *serious_lines(quick_findings(read.corpus), where=where)))
