"""Inspect a dataset: check each row as it is read, then compare all rows."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from whet.base.errors import UsageError
from whet.base.units import format_plural
from whet.recipes.text.corpus import Corpus, Examples, normalize_text
from whet.recipes.text.data_report.label_checks import (
    LabelMentions,
    header_labels,
    is_header,
    misspelled,
    single_split_labels,
    states_label,
)
from whet.recipes.text.data_report.report import (
    DEFECT_KINDS,
    DataFinding,
    DataReport,
    FindingCollector,
    FindingExample,
    SplitSummary,
)
from whet.recipes.text.data_report.row_index import (
    TEST,
    TRAIN,
    VAL,
    RowIndex,
    TextHashes,
    label_totals,
    length_stats,
)
from whet.recipes.text.data_report.text_checks import (
    ONE_MB,
    emptiness,
    fix_pair,
    script_of,
    snippet,
    text_defects,
)
from whet.recipes.text.readers.samples import (
    AUTO,
    ColumnNames,
    ColumnOverrides,
    SampleReader,
    TextSample,
    detect_separator,
    split_label,
    validate_separator,
)
from whet.recipes.text.readers.sources import find_sources

KIND_CODES = {kind: code for code, kind in enumerate(DEFECT_KINDS, start=1)}
LabelCounts = Counter[tuple[str, str]]
"""The number of rows by label and split."""

_SPLIT_NUMBERS = {"train": TRAIN, "val": VAL, "test": TEST, "all": TRAIN}
_LIST_SEPARATOR = "\x1f"
"""Joins the labels of a list, so that the list is stored as one cell."""
_MAX_TAGGED_LABELS = 2_000
"""The maximum number of labels for searching texts for their own label: each label needs a compiled pattern."""
_MAIN_SCRIPT_SHARE = 0.95
"""A dataset is multilingual if the share of its most frequent script is below this value."""
_UNLABELED = "unlabeled"
"""The kind of a row in a test file without a label column. It is not a defect, and its label is not checked."""


class LabelDecisions(NamedTuple):
    """The actions of `--fix` for defective labels."""

    corrections: dict[str, str]
    """Maps misspelled labels to the correct ones."""
    removed: dict[str, str]
    """Maps labels whose rows are removed to the kind of defect."""


class DatasetInspector:
    """Inspects all rows of a file or folder."""

    def __init__(self, path: Path, *, overrides: ColumnOverrides | None = None, separator: str | None = AUTO) -> None:
        self.index = RowIndex(find_sources(path))
        self.file_states = tuple(file_state(source.path) for source in self.index.sources)
        """The state of each file before it was read, so that a clean copy can detect a change."""
        self.overrides = overrides or ColumnOverrides()
        self.removal_codes = bytearray()
        """For each row, the code of the defect for which `--fix` removes it, or 0. Duplicates are not included."""
        self.corrections: dict[str, str] = {}
        """Maps misspelled labels to the correct ones."""
        self.mixed_endings: dict[int, int] = {}
        """Maps the indices of files with mixed line endings to the first row with the second kind of ending."""
        self._findings = FindingCollector()
        self._separator = validate_separator(separator)
        self._columns: list[ColumnNames] = []
        self._cells_by_split: dict[str, Counter[int]] = {}
        self._first_row_of_cell: dict[int, int] = {}
        self._has_lists = False
        self._mentions = LabelMentions()
        self._endings: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._splits_of_group: dict[int, int] = {}

    def run(self) -> DataReport:
        for number, source in enumerate(self.index.sources):
            reader = SampleReader(source, self.overrides)
            split = source.split or "all"
            cells = self._cells_by_split.setdefault(split, Counter())
            for sample in reader:
                self._inspect(sample, reader=reader, source=number, split=_SPLIT_NUMBERS[split], cells=cells)
            if reader.columns is not None:
                self._columns.append(reader.columns)
        if not len(self.index):
            path = self.index.sources[0].path
            raise UsageError(f"{path} has no rows", got="only a header", try_="rows with a text and a label")
        counts = self._label_counts()
        self._inspect_all(counts)
        return self._report(counts)

    # --- checks of one row --------------------------------------------------------------------------------------------

    def _inspect(
        self, sample: TextSample, *, reader: SampleReader, source: int, split: int, cells: Counter[int]
    ) -> None:
        index, row = self.index, len(self.index)
        index.add(sample, source=source)
        self._check_line(sample, row=row, source=source)
        kind = _unusable_kind(sample, reader.columns)
        self.removal_codes.append(KIND_CODES.get(kind or "", 0))
        if kind is not None:
            index.hashes.skip(split=split)
            index.scripts.append(script_of(sample.text) if kind == _UNLABELED else "")
            if kind != _UNLABELED:
                error = sample.row.error
                shown = error.got if error is not None else snippet(sample.text or sample.row.raw)
                self._add(kind, row, shows=shown or None)
            return
        text, cell = sample.text, _LIST_SEPARATOR.join(sample.labels)
        label = index.label_number(cell)
        cells[label] += 1
        if label not in self._first_row_of_cell:
            self._first_row_of_cell[label] = row
            self._mentions.add_label(cell)
        self._has_lists = self._has_lists or sample.is_list
        defects = text_defects(text if sample.pair is None else f"{text} {sample.pair}")
        for defect in defects:
            self._add(defect, row, shows=snippet(text))
        # Fix the text before comparing it, because broken characters would hide duplicates.
        normalized = normalize_text(*fix_pair(text, sample.pair)) if defects else normalize_text(text, sample.pair)
        exact = text if sample.pair is None else f"{text}\0{sample.pair}"
        index.hashes.add(exact, normalized, label=label, split=split)
        index.scripts.append(script_of(text))
        index.characters.append(len(text))
        index.words.append(normalized.count(" ") + 1)
        self._check_label_in_text(sample, normalized, row=row)
        if sample.group is not None and reader.columns is not None and reader.columns.group is not None:
            self._check_group(sample.group, split=split, row=row)

    def _check_line(self, sample: TextSample, *, row: int, source: int) -> None:
        # Check the line of several samples only once.
        if sample.number > 1:
            return
        if sample.row.has_bom:
            self._add("bom", row, shows="at the start of the file")
        if sample.row.ending:
            endings = self._endings[source]
            endings[sample.row.ending] += 1
            if len(endings) == 2:
                self.mixed_endings.setdefault(source, row)

    def _check_label_in_text(self, sample: TextSample, normalized: str, *, row: int) -> None:
        is_checked = len(self.index.labels) <= _MAX_TAGGED_LABELS
        if is_checked and any(states_label(normalized, name.casefold()) for name in sample.labels):
            self.removal_codes[row] = KIND_CODES["label-in-text"]
            self._add("label-in-text", row, shows=f"{', '.join(sample.labels)}: {snippet(sample.text)}")
        else:
            self._mentions.add_text(normalized, sample.labels, row=row)

    def _check_group(self, group: str, *, split: int, row: int) -> None:
        # Store a hash and a bit mask of splits per group, so that memory does not grow with the length of group names.
        key, bit = hash(group), 1 << split
        before = self._splits_of_group.setdefault(key, bit)
        if not before & bit:
            self._splits_of_group[key] = before | bit
            # Report a group once, when it appears in its second split.
            if before.bit_count() == 1:
                self._add("group-leak", row, shows=group)

    def _add(self, kind: str, row: int, *, other: int | None = None, shows: str | None = None) -> None:
        if not self._findings.needs_example(kind):
            self._findings.add(kind)
            return
        other_row = None if other is None else self.index.where(other)
        self._findings.add(kind, FindingExample(where=self.index.where(row), other=other_row, shows=shows))

    # --- checks of all rows -------------------------------------------------------------------------------------------

    def _inspect_all(self, counts: LabelCounts) -> None:
        index, findings = self.index, self._findings
        first_rows = {
            name: row
            for number, row in self._first_row_of_cell.items()
            for name in self._label_names(index.labels[number])
        }
        label_column = self._columns[0].label if self._columns else None
        self.corrections, removed = check_labels(
            counts, first_rows=first_rows, label_column=label_column, index=index, findings=findings
        )
        if removed and not self.is_multi_label:
            codes = {number: KIND_CODES[removed[name]] for number, name in enumerate(index.labels) if name in removed}
            for row, cell in enumerate(index.hashes.label):
                self.removal_codes[row] = self.removal_codes[row] or codes.get(cell, 0)
        for source, row in self.mixed_endings.items():
            endings = ", ".join(f"{count:,} x {ending!r}" for ending, count in self._endings[source].most_common())
            findings.add("line-endings", FindingExample(where=index.where(row), shows=endings))
        check_scripts(index, findings)
        for label, rows in self._mentions.only_own(label_totals(counts)).items():
            findings.add("label-named", count=self._mentions.own[label] - len(rows))
            for row in rows:
                findings.add("label-named", FindingExample(where=index.where(row), shows=f"label {label!r}"))
        for duplicate in index.hashes.duplicates():
            self._add(duplicate.kind, duplicate.row, other=duplicate.other)

    def _label_counts(self) -> LabelCounts:
        if self._has_lists:
            self._separator = _LIST_SEPARATOR
        elif self._separator == AUTO:
            self._separator = detect_separator(self.index.labels)
        counts: LabelCounts = Counter()
        for split, cells in self._cells_by_split.items():
            for number, count in cells.items():
                for name in self._label_names(self.index.labels[number]):
                    counts[name, split] += count
        return counts

    def _label_names(self, cell: str) -> list[str]:
        return split_label(cell, self._separator) if self._separator is not None else [cell]

    @property
    def is_multi_label(self) -> bool:
        """Whether some cells contain several labels, or none."""
        return self._separator is not None and any(len(self._label_names(cell)) != 1 for cell in self.index.labels)

    def _report(self, counts: LabelCounts) -> DataReport:
        index = self.index
        splits = []
        for name in self._cells_by_split:
            own = [number for number, source in enumerate(index.sources) if (source.split or "all") == name]
            labels = {label: count for (label, split), count in sorted(counts.items()) if split == name}
            files = tuple(str(index.sources[number].path) for number in own)
            splits.append(SplitSummary(name=name, files=files, rows=sum(map(index.rows_of, own)), labels=labels))
        return DataReport(
            formats=tuple(dict.fromkeys(source.format for source in index.sources)),
            columns=" and ".join(dict.fromkeys(columns.describe() for columns in self._columns)),
            is_multi_label=self.is_multi_label,
            rows=len(index),
            splits=tuple(splits),
            labels=dict(sorted(label_totals(counts).items(), key=lambda pair: (-pair[1], pair[0]))),
            characters=length_stats(index.characters),
            words=length_stats(index.words),
            findings=self._findings.findings(self.index.hashes.breakdown()),
        )


def _unusable_kind(sample: TextSample, columns: ColumnNames | None) -> str | None:
    """Return the kind of defect that makes a row unusable for training, or None."""
    if sample.row.error is not None:
        return sample.row.error.kind
    if sample.row.num_bytes >= ONE_MB or len(sample.text) >= ONE_MB:
        return "long"
    kind = emptiness(sample.text) or (None if sample.pair is None else emptiness(sample.pair))
    if kind is not None:
        return kind
    assert columns is not None
    label = sample.labels[0] if sample.labels else ""
    if label and is_header(sample.text, label, columns=(columns.text, columns.label or "label")):
        return "header"
    if sample.labels or sample.is_list:
        return None
    return _UNLABELED if columns.label is None else "no-label"


def check_labels(
    counts: LabelCounts,
    *,
    first_rows: Mapping[str, int],
    label_column: str | None,
    index: RowIndex,
    findings: FindingCollector,
) -> LabelDecisions:
    """Report labels that are headers, are misspelled, occur only once or occur in only one of several splits.

    Args:
        first_rows: The first row of each label, used as an example.
    """
    totals = label_totals(counts)

    def add(kind: str, name: str, shows: str, *, count: int = 1) -> None:
        findings.add(kind, FindingExample(where=index.where(first_rows[name]), shows=shows), count=count)

    headers = header_labels(totals, label_column=label_column)
    labels = {name: count for name, count in sorted(totals.items()) if name not in headers}
    corrections = misspelled(labels)
    in_one_split = single_split_labels(counts)
    removed = dict.fromkeys(headers, "header")
    for name in headers:
        add("header", name, f"label {name!r}", count=totals[name])
    for name, correct in sorted(corrections.items()):
        add("misspelled-label", name, f"{name!r} ({totals[name]:,}), probably {correct!r} ({totals[correct]:,})")
    for name in labels:
        if name in corrections:
            continue
        if totals[name] == 1:
            add("single-label", name, repr(name))
            removed[name] = "single-label"
        if name in in_one_split:
            add(
                "one-split-label", name, f"{name!r} only in {in_one_split[name]} ({format_plural(totals[name], 'row')})"
            )
    return LabelDecisions(corrections, removed)


def check_scripts(index: RowIndex, findings: FindingCollector) -> None:
    """Report texts in a different script if nearly all texts are in the same script."""
    counts = Counter(filter(None, index.scripts))
    main, rows = counts.most_common(1)[0] if counts else ("", 0)
    if rows < _MAIN_SCRIPT_SHARE * counts.total():
        return
    for row, script in enumerate(index.scripts):
        if script and script != main:
            findings.add("script", FindingExample(where=index.where(row), shows=f"{script} among {main}"))


def file_state(path: Path) -> tuple[int, int]:
    """Return the size and modification time of a file, to detect changes."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def quick_findings(corpus: Corpus) -> tuple[DataFinding, ...]:
    """Return the serious defects of a corpus in memory, without examples. Called before training."""
    findings, hashes = FindingCollector(), TextHashes()
    counts: Counter[str] = Counter()
    names = [name.casefold() for name in corpus.classes]
    for split, part in ((TRAIN, corpus.train), (VAL, corpus.val), (TEST, corpus.test)):
        for row, labels in enumerate(_label_sets(part)):
            pair = part.pairs[row] if part.pairs else None
            normalized = normalize_text(*fix_pair(part.texts[row], pair))
            # Label sets are only compared for equality. The mask makes the hash a non-negative int32.
            hashes.add(f"{part.texts[row]}\0{pair}", normalized, label=hash(labels) & 0x7FFFFFFF, split=split)
            counts.update(corpus.classes[label] for label in labels)
            if any(states_label(normalized, names[label]) for label in labels):
                findings.add("label-in-text")
    for duplicate in hashes.duplicates():
        findings.add(duplicate.kind)
    findings.add("misspelled-label", count=len(misspelled(counts)))
    findings.add("header", count=sum(counts[name] for name in header_labels(counts, label_column=None)))
    return tuple(finding for finding in findings.findings(hashes.breakdown()) if finding.is_serious)


def _label_sets(part: Examples) -> tuple[tuple[int, ...], ...]:
    return part.label_sets or tuple((label,) for label in part.labels)
