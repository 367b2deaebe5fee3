"""What is wrong with labelled texts? Every row is looked at once, and compared with all others at the end."""

from collections import Counter, defaultdict
from pathlib import Path

from whet.base.errors import UsageError
from whet.recipes.text.folding import folded
from whet.recipes.text.inspection import label_checks, wholes
from whet.recipes.text.inspection.kinds import KINDS
from whet.recipes.text.inspection.label_in_text import Names, says_label
from whet.recipes.text.inspection.ledger import Ledger, merged, spread
from whet.recipes.text.inspection.repeats import DEV, TEST, TRAIN
from whet.recipes.text.inspection.report import DataReport, Example, Findings, Part
from whet.recipes.text.inspection.scripts import script_of
from whet.recipes.text.inspection.text_checks import ONE_MB, blemishes, hollow, put_right, snippet
from whet.recipes.text.rows.columns import Columns, Wishes
from whet.recipes.text.rows.labels import AUTO, checked_separator, clear_separator, split_label
from whet.recipes.text.rows.samples import Sample, SampleReader
from whet.recipes.text.rows.sources import find_sources

KIND_CODES = {kind: code for code, kind in enumerate(KINDS, start=1)}
_PARTS = {"train": TRAIN, "dev": DEV, "test": TEST, "all": TRAIN}
_LIST_SIGN = "\x1f"
"""Between the labels of a list, when it is kept as one cell."""

_MOST_NAMED = 2_000
"""With more labels it is not looked whether texts say theirs: each is a pattern of its own."""
_UNLABELLED = "unlabelled"
"""A row of a test file that has no label column: no defect, and nothing to compare."""


class Inspection:
    """Looks at all rows of a file or folder."""

    def __init__(self, path: Path, *, wishes: Wishes | None = None, separator: str | None = AUTO) -> None:
        self.ledger = Ledger(find_sources(path))
        self.findings = Findings()
        self.states = tuple(state_of(source.path) for source in self.ledger.sources)
        """Size and time of each file before it was read: a copy is made of these rows only."""
        self.wishes = wishes or Wishes()
        self.doomed = bytearray()
        """For each row the code of the kind for which `--fix` takes it out, 0 for none; repeats are not in it."""
        self.meant: dict[str, str] = {}
        """Labels that are another one, misspelt."""
        self._separator = checked_separator(separator)
        self._columns: list[Columns] = []
        self._by_part: dict[str, Counter[int]] = {}
        self._first_rows: dict[int, int] = {}
        self._has_lists = False
        self._names = Names()
        self._endings: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self.other_ending: dict[int, int] = {}
        """Of files that end lines in two ways: a row that shows the second."""
        self._groups: dict[int, int] = {}

    def run(self) -> DataReport:
        """The whole report."""
        for index, source in enumerate(self.ledger.sources):
            reader = SampleReader(source, self.wishes)
            part = source.part or "all"
            labels = self._by_part.setdefault(part, Counter())
            for sample in reader:
                self._take(sample, reader=reader, source=index, part=_PARTS[part], labels=labels)
            if reader.columns is not None:
                self._columns.append(reader.columns)
        if not len(self.ledger):
            path = self.ledger.sources[0].path
            raise UsageError(f"{path} is empty", got="a header without rows", try_="rows with a text and a label")
        return self._report(self._look_at_all())

    # --- one row -----------------------------------------------------------------------------------------------------

    def _take(self, sample: Sample, *, reader: SampleReader, source: int, part: int, labels: Counter[int]) -> None:
        ledger, row = self.ledger, len(self.ledger)
        ledger.place(sample, source=source)
        self._look_at_line(sample, row=row, source=source)
        kind = _unusable(sample, reader.columns)
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
        text, cell = sample.text, _LIST_SIGN.join(sample.labels)
        label = ledger.label_number(cell)
        labels[label] += 1
        if label not in self._first_rows:
            self._first_rows[label] = row
            self._names.know(cell)
        found = blemishes(text if sample.pair is None else f"{text} {sample.pair}")
        same = folded(*put_right(text, sample.pair)) if found else folded(text, sample.pair)
        ledger.texts.add(text if sample.pair is None else f"{text}\0{sample.pair}", same, label=label, part=part)
        ledger.script.append(script_of(text))
        ledger.characters.append(len(text))
        ledger.words.append(same.count(" ") + 1)
        self._has_lists = self._has_lists or sample.is_list
        for blemish in found:
            self._add(blemish, row, shows=snippet(text))
        is_known = len(ledger.names) <= _MOST_NAMED
        if is_known and any(says_label(same, name.casefold()) for name in sample.labels):
            self.doomed[row] = KIND_CODES["label-in-text"]
            self._add("label-in-text", row, shows=f"{', '.join(sample.labels)}: {snippet(text)}")
        else:
            self._names.look(same, sample.labels, row=row)
        if sample.group is not None and reader.columns is not None and reader.columns.group is not None:
            self._look_at_group(sample.group, part=part, row=row)

    def _look_at_line(self, sample: Sample, *, row: int, source: int) -> None:
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
        self.findings.add(kind, Example(where=self.ledger.where(row), other=beside, shows=shows))

    # --- all rows ----------------------------------------------------------------------------------------------------

    def _look_at_all(self) -> wholes.Counts:
        ledger, findings = self.ledger, self.findings
        counts = self._label_counts()
        self.meant, doomed = wholes.look_at_labels(
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
        for example in wholes.look_at_line_ends(self._endings, self.other_ending, ledger=ledger):
            findings.add("line-ends", example)
        wholes.look_at_scripts(ledger, findings)
        wholes.look_at_names(self._names, counts, ledger=ledger, findings=findings)
        for repeat in ledger.texts.repeats():
            self._add(repeat.kind, repeat.row, other=repeat.other)
        return counts

    def _label_counts(self) -> wholes.Counts:
        if self._has_lists:
            self._separator = _LIST_SIGN
        elif self._separator == AUTO:
            self._separator = clear_separator(self.ledger.names)
        counts: wholes.Counts = Counter()
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

    def _report(self, counts: wholes.Counts) -> DataReport:
        ledger = self.ledger
        parts = []
        for name in self._by_part:
            own = [number for number, source in enumerate(ledger.sources) if (source.part or "all") == name]
            labels = {label: count for (label, part), count in sorted(counts.items()) if part == name}
            files = tuple(str(ledger.sources[number].path) for number in own)
            parts.append(Part(name=name, files=files, rows=sum(map(ledger.rows_of, own)), labels=labels))
        return DataReport(
            forms=tuple(dict.fromkeys(source.form for source in ledger.sources)),
            columns=" and ".join(dict.fromkeys(columns.told() for columns in self._columns)),
            is_multi_label=self.is_multi_label,
            rows=len(ledger),
            parts=tuple(parts),
            labels=dict(sorted(merged(counts).items(), key=lambda pair: (-pair[1], pair[0]))),
            characters=spread(ledger.characters),
            words=spread(ledger.words),
            findings=self.findings.done(),
        )


def _unusable(sample: Sample, columns: Columns | None) -> str | None:
    """The kind of a row that leaves nothing to learn from, or None."""
    if sample.row.fault is not None:
        return sample.row.fault.kind
    if sample.row.num_bytes >= ONE_MB or len(sample.text) >= ONE_MB:
        return "long"
    kind = hollow(sample.text) or (None if sample.pair is None else hollow(sample.pair))
    if kind is not None:
        return kind
    assert columns is not None
    label = sample.labels[0] if sample.labels else ""
    if label and label_checks.is_header(sample.text, label, columns=(columns.text, columns.label or "label")):
        return "header"
    if sample.labels or sample.is_list:
        return None
    return _UNLABELLED if columns.label is None else "no-label"


def state_of(path: Path) -> tuple[int, int]:
    """What changes when a file does."""
    told = path.stat()
    return told.st_size, told.st_mtime_ns


def inspect(path: Path, *, wishes: Wishes | None = None, separator: str | None = AUTO) -> DataReport:
    """What a file or folder of labelled texts holds, and what is wrong with it."""
    return Inspection(path, wishes=wishes, separator=separator).run()
