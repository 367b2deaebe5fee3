"""How do your texts become a corpus? Every row whole, columns and labels understood, missing parts cut from train."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from whet.base.errors import UsageError
from whet.recipes.text.corpus import Corpus, Examples
from whet.recipes.text.rows.columns import Wishes
from whet.recipes.text.rows.labels import AUTO, checked_separator, clear_separator, split_label
from whet.recipes.text.rows.row import Source
from whet.recipes.text.rows.samples import Sample, SampleReader
from whet.recipes.text.rows.sources import find_sources
from whet.recipes.text.splitting import split


class _Row(NamedTuple):
    """A text with the names of its classes."""

    text: str
    pair: str | None
    labels: tuple[str, ...]
    group: str | None


@dataclass(frozen=True, kw_only=True)
class _Read:
    """What was found on disk, by part."""

    where: str
    parts: dict[str, list[_Row]] = field(default_factory=lambda: {"train": [], "dev": [], "test": []})
    told: list[str] = field(default_factory=list)
    """Forms and columns, in words."""
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """A corpus, and what was understood on the way to it, in a few lines."""

    corpus: Corpus
    told: tuple[str, ...] = ()


def read_table(*paths: Path, wishes: Wishes | None = None, separator: str | None = AUTO, split_seed: int = 0) -> Corpus:
    """The rows of all files and folders as one corpus; what a folder does not bring is cut from its training rows."""
    return read_texts(*paths, wishes=wishes, separator=separator, split_seed=split_seed).corpus


def read_texts(*paths: Path, wishes: Wishes | None = None, separator: str | None = AUTO, split_seed: int = 0) -> Texts:
    """The same, with what was understood."""
    read = _Read(where=", ".join(map(str, paths)))
    is_list = [_read_source(source, wishes or Wishes(), read) for path in paths for source in find_sources(path)]
    is_multi = _names_each(read, separator=separator, has_lists=any(is_list))
    parts = read.parts
    classes = _class_names(parts["train"], held_out=[*parts["dev"], *parts["test"]], where=read.where)
    train, dev, test = (_numbered(parts[name], classes=classes, is_multi=is_multi) for name in parts)
    groups = [row.group for row in parts["train"]]
    corpus = _with_missing_parts(
        train, dev=dev, test=test, classes=classes, where=read.where, seed=split_seed, groups=groups
    )
    return Texts(corpus=corpus, told=(*_told(read, corpus, is_multi=is_multi), *read.left_out))


# --- rows ------------------------------------------------------------------------------------------------------------


def _read_source(source: Source, wishes: Wishes, read: _Read) -> bool:
    """Adds the rows of a source to its part; whether its labels are lists."""
    reader = SampleReader(source, wishes)
    rows: list[_Row] = []
    first_bare: UsageError | None = None
    has_lists = False
    for sample in reader:
        _refuse_faulty(sample, source)
        columns = reader.columns
        assert columns is not None
        where = f"{source.path}, row {sample.row.line}"
        text, pair = sample.text.strip(), None if sample.pair is None else sample.pair.strip()
        if not text:
            raise _empty(columns.text, sample, where=where)
        if pair == "":
            raise _empty(columns.pair or "", sample, where=where)
        if not sample.labels and not sample.is_list:
            bare = _empty(columns.label or "label", sample, where=where)
            if source.part != "test":
                raise bare
            first_bare = first_bare or bare
        has_lists = has_lists or sample.is_list
        rows.append(_Row(text, pair, sample.labels, sample.group))
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


def _refuse_faulty(sample: Sample, source: Source) -> None:
    fault = sample.fault
    if fault is None:
        return
    at = f"{source.path}" if fault.kind == "not-utf8" else f"row {sample.row.line} of {source.path}"
    raise UsageError(f"{at} {fault.what}", got=fault.got, try_=fault.try_)


def _empty(column: str, sample: Sample, *, where: str) -> UsageError:
    return UsageError(
        f"an empty {column} in {where}",
        got=repr(sample.row.cells.get(column)),
        try_="fill it in, or remove the row; whet data text FILE --fix OUT removes such rows",
    )


# --- labels ----------------------------------------------------------------------------------------------------------


def _names_each(read: _Read, *, separator: str | None, has_lists: bool) -> bool:
    """Cuts labels that name several classes, in place; whether a row may have several."""
    rows = [row for part in read.parts.values() for row in part]
    separator = checked_separator(separator)
    if has_lists:
        return any(len(row.labels) != 1 for row in rows)
    if separator == AUTO:
        separator = clear_separator(row.labels[0] for row in rows)
    if separator is None:
        return False
    for part in read.parts.values():
        part[:] = [row._replace(labels=tuple(split_label(row.labels[0], separator))) for row in part]
    read.left_out.append(f"labels are separated by {separator!r} (label_separator=null takes them whole)")
    return True


def _class_names(train: list[_Row], *, held_out: list[_Row], where: str) -> list[str]:
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


def _numbered(rows: list[_Row], *, classes: Sequence[str], is_multi: bool) -> Examples:
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


def _with_missing_parts(
    train: Examples,
    *,
    dev: Examples,
    test: Examples,
    classes: Sequence[str],
    where: str,
    seed: int,
    groups: Sequence[str | None],
) -> Corpus:
    if dev and test:
        return Corpus(classes=tuple(classes), train=train, dev=dev, test=test)
    cut = split(train, classes=classes, seed=seed, groups=groups)
    if dev:
        cut = Corpus(classes=cut.classes, train=cut.train.joined(cut.dev), dev=dev, test=cut.test)
    elif test:
        cut = Corpus(classes=cut.classes, train=cut.train.joined(cut.test), dev=cut.dev, test=test)
    for name, part in (("dev", cut.dev), ("test", cut.test)):
        if not part:
            raise UsageError(
                f"too few rows to hold a {name} part back",
                got=f"{len(train)} rows of {len(classes)} classes in {where}",
                try_="at least ten different texts (or groups) of a class, or a folder with train, dev and test files",
            )
    return cut


def _told(read: _Read, corpus: Corpus, *, is_multi: bool) -> list[str]:
    sizes = [len(rows) for rows in read.parts.values() if rows]
    forms = " and ".join(dict.fromkeys(read.told))
    each = "a text may have several" if is_multi else ""
    line = f"read {' + '.join(f'{size:,}' for size in sizes)} rows of {forms}, {len(corpus.classes)} classes"
    told = [f"{line} ({each})" if each else line]
    if len(sizes) < 3:
        parts = f"{len(corpus.train):,} + {len(corpus.dev):,} + {len(corpus.test):,}"
        told.append(f"split into {parts} (train, dev, test); equal texts and groups stay on one side")
    return told
