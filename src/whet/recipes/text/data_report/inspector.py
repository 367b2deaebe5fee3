"""Inspect a dataset: every row once, then all rows together."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from whet.base.errors import UsageError
from whet.base.units import format_plural
from whet.recipes.text.corpus import Corpus, Examples, normalize_text
from whet.recipes.text.data_report import label_checks
from whet.recipes.text.data_report.label_checks import LabelMentions, header_labels, misspelt, states_label
from whet.recipes.text.data_report.report import (
    DEFECT_KINDS,
    DataFinding,
    DataReport,
    FindingCollector,
    FindingExample,
    SplitSummary,
)
from whet.recipes.text.data_report.row_index import TEST, TRAIN, VAL, RowIndex, TextHashes, label_totals, length_stats
from whet.recipes.text.data_report.text_checks import (
    ONE_MB,
    SCRIPTS,
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

_MAIN_SCRIPT_SHARE = 0.95
"""Where fewer texts are in one script, several are meant."""

LabelCounts = Counter[tuple[str, str]]
"""Rows by label and part."""


class LabelDecisions(NamedTuple):
    """What is to become of labels."""

    meant: dict[str, str]
    """Misspelt ones, with what they should be."""
    doomed: dict[str, str]
    """Those whose rows `--fix` takes out, with the kind."""


def check_labels(
    counts: LabelCounts,
    *,
    first: Mapping[str, int],
    label_column: str | None,
    ledger: RowIndex,
    findings: FindingCollector,
) -> LabelDecisions:
    """Tells of labels that are probably not meant; `first` names a row of each."""
    totals = label_totals(counts)

    def tell(kind: str, name: str, shows: str, *, count: int = 1) -> None:
        findings.add(kind, FindingExample(where=ledger.where(first[name]), shows=shows), count=count)

    headers = label_checks.header_labels(totals, label_column=label_column)
    named = {name: count for name, count in sorted(totals.items()) if name not in headers}
    meant = label_checks.misspelt(named)
    alone = label_checks.single_split_labels(counts)
    doomed = dict.fromkeys(headers, "header")
    for name in headers:
        tell("header", name, f"label {name!r}", count=totals[name])
    for name, should in sorted(meant.items()):
        tell("misspelt-label", name, f"{name!r} ({totals[name]:,}), probably {should!r} ({totals[should]:,})")
    for name in named:
        if name in meant:
            continue
        if totals[name] == 1:
            tell("single-label", name, repr(name))
            doomed[name] = "single-label"
        if name in alone:
            tell("one-part-label", name, f"{name!r} only in {alone[name]} ({format_plural(totals[name], 'row')})")
    return LabelDecisions(meant, doomed)


def check_line_endings(
    endings: Mapping[int, Counter[str]], others: Mapping[int, int], *, ledger: RowIndex
) -> list[FindingExample]:
    """Files that end lines in two ways; `others` names a row in which the second way is seen."""
    return [
        FindingExample(
            where=ledger.where(row),
            shows=", ".join(f"{count:,} times {ending!r}" for ending, count in endings[source].most_common()),
        )
        for source, row in others.items()
    ]


def check_scripts(ledger: RowIndex, findings: FindingCollector) -> None:
    """Tells of texts in another script, where nearly all are in one."""
    seen = Counter(ledger.script)
    del seen[0]
    total = sum(seen.values())
    main, rows = seen.most_common(1)[0] if seen else (0, 0)
    if rows == total or rows < _MAIN_SCRIPT_SHARE * total:
        return
    for row, script in enumerate(ledger.script):
        if script not in (0, main):
            shows = f"{SCRIPTS[script]} among {SCRIPTS[main]}"
            wanted = findings.wants("script")
            findings.add("script", FindingExample(where=ledger.where(row), shows=shows) if wanted else None)


def check_label_mentions(
    names: LabelMentions, counts: LabelCounts, *, ledger: RowIndex, findings: FindingCollector
) -> None:
    """Tells of labels whose name stands in their own texts alone."""
    for label, rows in names.telling(label_totals(counts)).items():
        findings.add("label-named", count=names.own[label] - len(rows))
        for row in rows:
            findings.add("label-named", FindingExample(where=ledger.where(row), shows=f"label {label!r}"))


KIND_CODES = {kind: code for code, kind in enumerate(DEFECT_KINDS, start=1)}
_SPLIT_NUMBERS = {"train": TRAIN, "val": VAL, "test": TEST, "all": TRAIN}
_LIST_SEPARATOR = "\x1f"
"""Between the labels of a list, when it is kept as one cell."""

_MAX_CHECKED_LABELS = 2_000
"""With more labels it is not looked whether texts say theirs: each is a pattern of its own."""
_UNLABELLED = "unlabelled"
"""A row of a test file that has no label column: no defect, and nothing to compare."""


class DatasetInspector:
    """Looks at all rows of a file or folder."""

    def __init__(self, path: Path, *, overrides: ColumnOverrides | None = None, separator: str | None = AUTO) -> None:
        self.ledger = RowIndex(find_sources(path))
        self.findings = FindingCollector()
        self.states = tuple(file_state(source.path) for source in self.ledger.sources)
        """Size and time of each file before it was read: a copy is made of these rows only."""
        self.overrides = overrides or ColumnOverrides()
        self.doomed = bytearray()
        """For each row the code of the kind for which `--fix` takes it out, 0 for none; repeats are not in it."""
        self.meant: dict[str, str] = {}
        """Labels that are another one, misspelt."""
        self._separator = validate_separator(separator)
        self._columns: list[ColumnNames] = []
        self._by_part: dict[str, Counter[int]] = {}
        self._first_rows: dict[int, int] = {}
        self._has_lists = False
        self._names = LabelMentions()
        self._endings: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self.other_ending: dict[int, int] = {}
        """Of files that end lines in two ways: a row that shows the second."""
        self._groups: dict[int, int] = {}

    def run(self) -> DataReport:
        """The whole report."""
        for index, source in enumerate(self.ledger.sources):
            reader = SampleReader(source, self.overrides)
            part = source.part or "all"
            labels = self._by_part.setdefault(part, Counter())
            for sample in reader:
                self._take(sample, reader=reader, source=index, part=_SPLIT_NUMBERS[part], labels=labels)
            if reader.columns is not None:
                self._columns.append(reader.columns)
        if not len(self.ledger):
            path = self.ledger.sources[0].path
            raise UsageError(f"{path} is empty", got="a header without rows", try_="rows with a text and a label")
        return self._report(self._look_at_all())

    # --- one row -----------------------------------------------------------------------------------------------------

    def _take(self, sample: TextSample, *, reader: SampleReader, source: int, part: int, labels: Counter[int]) -> None:
        ledger, row = self.ledger, len(self.ledger)
        ledger.place(sample, source=source)
        self._look_at_line(sample, row=row, source=source)
        kind = _unusable_kind(sample, reader.columns)
        self.doomed.append(KIND_CODES.get(kind or "", 0))
        if kind == _UNLABELLED:
            ledger.texts.skip(part=part)
            ledger.script.append(script_of(sample.text))
            return
        if kind is not None:
            shown = sample.row.fault.got if sample.row.fault is not None else snippet(sample.text or sample.row.raw)
            self._add(kind, row, shows=shown or None)
            ledger.texts.skip(part=part)
            ledger.script.append(0)
            return
        text, cell = sample.text, _LIST_SEPARATOR.join(sample.labels)
        label = ledger.label_number(cell)
        labels[label] += 1
        if label not in self._first_rows:
            self._first_rows[label] = row
            self._names.know(cell)
        found = text_defects(text if sample.pair is None else f"{text} {sample.pair}")
        same = normalize_text(*fix_pair(text, sample.pair)) if found else normalize_text(text, sample.pair)
        ledger.texts.add(text if sample.pair is None else f"{text}\0{sample.pair}", same, label=label, part=part)
        ledger.script.append(script_of(text))
        ledger.characters.append(len(text))
        ledger.words.append(same.count(" ") + 1)
        self._has_lists = self._has_lists or sample.is_list
        for blemish in found:
            self._add(blemish, row, shows=snippet(text))
        is_known = len(ledger.names) <= _MAX_CHECKED_LABELS
        if is_known and any(states_label(same, name.casefold()) for name in sample.labels):
            self.doomed[row] = KIND_CODES["label-in-text"]
            self._add("label-in-text", row, shows=f"{', '.join(sample.labels)}: {snippet(text)}")
        else:
            self._names.look(same, sample.labels, row=row)
        if sample.group is not None and reader.columns is not None and reader.columns.group is not None:
            self._look_at_group(sample.group, part=part, row=row)

    def _look_at_line(self, sample: TextSample, *, row: int, source: int) -> None:
        if sample.number > 1:
            return
        if sample.row.has_bom:
            self._add("bom", row, shows="at the start of the file")
        if sample.row.ending:
            seen = self._endings[source]
            seen[sample.row.ending] += 1
            if len(seen) == 2:
                self.other_ending.setdefault(source, row)

    def _look_at_group(self, group: str, *, part: int, row: int) -> None:
        key, bit = hash(group), 1 << part
        before = self._groups.setdefault(key, bit)
        if not before & bit:
            self._groups[key] = before | bit
            if before.bit_count() == 1:
                self._add("group-leak", row, shows=group)

    def _add(self, kind: str, row: int, *, other: int | None = None, shows: str | None = None) -> None:
        if not self.findings.wants(kind):
            self.findings.add(kind)
            return
        beside = None if other is None else self.ledger.where(other)
        self.findings.add(kind, FindingExample(where=self.ledger.where(row), other=beside, shows=shows))

    # --- all rows ----------------------------------------------------------------------------------------------------

    def _look_at_all(self) -> LabelCounts:
        ledger, findings = self.ledger, self.findings
        counts = self._label_counts()
        self.meant, doomed = check_labels(
            counts,
            first={name: row for number, row in self._first_rows.items() for name in self._cut(ledger.names[number])},
            label_column=self._columns[0].label if self._columns else None,
            ledger=ledger,
            findings=findings,
        )
        if doomed and not self.is_multi_label:
            codes = {number: KIND_CODES[doomed[name]] for number, name in enumerate(ledger.names) if name in doomed}
            for row, label in enumerate(ledger.texts.label):
                self.doomed[row] = self.doomed[row] or codes.get(label, 0)
        for example in check_line_endings(self._endings, self.other_ending, ledger=ledger):
            findings.add("line-ends", example)
        check_scripts(ledger, findings)
        check_label_mentions(self._names, counts, ledger=ledger, findings=findings)
        for repeat in ledger.texts.repeats():
            self._add(repeat.kind, repeat.row, other=repeat.other)
        return counts

    def _label_counts(self) -> LabelCounts:
        if self._has_lists:
            self._separator = _LIST_SEPARATOR
        elif self._separator == AUTO:
            self._separator = detect_separator(self.ledger.names)
        counts: LabelCounts = Counter()
        for part, labels in self._by_part.items():
            for number, count in labels.items():
                for name in self._cut(self.ledger.names[number]):
                    counts[name, part] += count
        return counts

    def _cut(self, cell: str) -> list[str]:
        return split_label(cell, self._separator) if self._separator is not None else [cell]

    @property
    def is_multi_label(self) -> bool:
        """Whether cells name several labels, or none."""
        return self._separator is not None and any(len(self._cut(name)) != 1 for name in self.ledger.names)

    def _report(self, counts: LabelCounts) -> DataReport:
        ledger = self.ledger
        parts = []
        for name in self._by_part:
            own = [number for number, source in enumerate(ledger.sources) if (source.part or "all") == name]
            labels = {label: count for (label, part), count in sorted(counts.items()) if part == name}
            files = tuple(str(ledger.sources[number].path) for number in own)
            parts.append(SplitSummary(name=name, files=files, rows=sum(map(ledger.rows_of, own)), labels=labels))
        return DataReport(
            forms=tuple(dict.fromkeys(source.form for source in ledger.sources)),
            columns=" and ".join(dict.fromkeys(columns.told() for columns in self._columns)),
            is_multi_label=self.is_multi_label,
            rows=len(ledger),
            parts=tuple(parts),
            labels=dict(sorted(label_totals(counts).items(), key=lambda pair: (-pair[1], pair[0]))),
            characters=length_stats(ledger.characters),
            words=length_stats(ledger.words),
            findings=self.findings.done(),
        )


def _unusable_kind(sample: TextSample, columns: ColumnNames | None) -> str | None:
    """The kind of a row that leaves nothing to learn from, or None."""
    if sample.row.fault is not None:
        return sample.row.fault.kind
    if sample.row.num_bytes >= ONE_MB or len(sample.text) >= ONE_MB:
        return "long"
    kind = emptiness(sample.text) or (None if sample.pair is None else emptiness(sample.pair))
    if kind is not None:
        return kind
    assert columns is not None
    label = sample.labels[0] if sample.labels else ""
    if label and label_checks.is_header(sample.text, label, columns=(columns.text, columns.label or "label")):
        return "header"
    if sample.labels or sample.is_list:
        return None
    return _UNLABELLED if columns.label is None else "no-label"


def file_state(path: Path) -> tuple[int, int]:
    """What changes when a file does."""
    told = path.stat()
    return told.st_size, told.st_mtime_ns


def inspect(path: Path, *, overrides: ColumnOverrides | None = None, separator: str | None = AUTO) -> DataReport:
    """What a file or folder of labelled texts holds, and what is wrong with it."""
    return DatasetInspector(path, overrides=overrides, separator=separator).run()


def quick_findings(corpus: Corpus) -> tuple[DataFinding, ...]:
    """Repeats, contradictions, labels that are probably wrong, and texts that say their label; without places."""
    findings, texts = FindingCollector(), TextHashes()
    counts: Counter[str] = Counter()
    names = [name.casefold() for name in corpus.classes]
    for number, part in ((TRAIN, corpus.train), (VAL, corpus.val), (TEST, corpus.test)):
        for row, labels in enumerate(_label_sets(part)):
            pair = part.pairs[row] if part.pairs else None
            same = normalize_text(*fix_pair(part.texts[row], pair))
            texts.add(f"{part.texts[row]}\0{pair}", same, label=hash(labels) & 0x7FFFFFFF, part=number)
            counts.update(corpus.classes[label] for label in labels)
            if any(states_label(same, names[label]) for label in labels):
                findings.add("label-in-text")
    for repeat in texts.repeats():
        findings.add(repeat.kind)
    findings.add("misspelt-label", count=len(misspelt(counts)))
    findings.add("header", count=sum(counts[name] for name in header_labels(counts, label_column=None)))
    return tuple(finding for finding in findings.done() if finding.is_serious)


def _label_sets(part: Examples) -> tuple[tuple[int, ...], ...]:
    return part.label_sets or tuple((label,) for label in part.labels)
