"""The data report: kinds of defects, findings, and their text form."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from whet.base.model import FrozenModel
from whet.base.units import format_plural

FixAction = Literal["removed", "changed", "left"]


class DefectKind(NamedTuple):
    """A kind of defect."""

    says: str
    """What is counted."""
    cure: FixAction
    """What `--fix` does: takes the row out, changes it, or leaves it to you."""
    is_serious: bool = False
    """Whether a training should not start without having said so."""


DEFECT_KINDS: dict[str, DefectKind] = {
    # A row whose text cannot be had.
    "not-utf8": DefectKind("rows that are not UTF-8", "removed"),
    "not-a-row": DefectKind("lines that are no JSON object", "removed"),
    "truncated": DefectKind("rows that are cut short: a field, a quote or a bracket is missing", "removed"),
    "columns": DefectKind("rows with more fields than the header", "removed"),
    "long": DefectKind("rows of 1 MB or more", "removed"),
    "header": DefectKind("rows that are headers", "removed", is_serious=True),
    # A text that says nothing, or something else than was meant.
    "empty": DefectKind("empty texts", "removed"),
    "spaces": DefectKind("texts of spaces only", "removed"),
    "punctuation": DefectKind("texts of punctuation only", "removed"),
    "nul": DefectKind("texts with NUL bytes", "changed"),
    "control": DefectKind("texts with control characters", "changed"),
    "bom": DefectKind("byte order marks at the start of a file or in a text", "changed"),
    "line-ends": DefectKind("files that end lines in two ways", "changed"),
    "mojibake": DefectKind("texts with UTF-8 that was read in another encoding", "changed"),
    "lost-characters": DefectKind("texts with U+FFFD, which stands for a lost character", "left"),
    "html": DefectKind("texts with remains of HTML", "changed"),
    "script": DefectKind("texts in another script than the rest", "left"),
    "label-in-text": DefectKind("texts that say their label", "removed", is_serious=True),
    "label-named": DefectKind("texts with the name of their label, which no text of another label has", "left"),
    # Labels.
    "no-label": DefectKind("rows without a label", "removed"),
    "misspelt-label": DefectKind("labels that are probably another one, misspelt", "changed", is_serious=True),
    "single-label": DefectKind("labels that are seen once", "removed"),
    "one-part-label": DefectKind("labels that only one part has", "left", is_serious=True),
    # The same text again.
    "duplicate": DefectKind("rows that repeat an earlier one of their part", "removed"),
    "folded-duplicate": DefectKind(
        "rows that repeat an earlier one of their part, but for case, spaces and broken characters", "removed"
    ),
    "leak": DefectKind("held-out texts that another part has too", "removed", is_serious=True),
    "folded-leak": DefectKind(
        "held-out texts that another part has too, but for case, spaces and broken characters", "removed", True
    ),
    "two-labels": DefectKind("rows whose text has another label in another row", "removed", is_serious=True),
    "group-leak": DefectKind("groups that are in several parts", "left", is_serious=True),
}
"""In the order in which they are told."""


class FindingExample(FrozenModel):
    """A row that shows a finding."""

    where: str
    """FILE:LINE."""
    other: str | None = None
    """The row that it repeats or contradicts."""
    shows: str | None = None
    """A piece of the text, or what is wrong in words."""


class DataFinding(FrozenModel):
    """A kind of defect with how often it was found."""

    kind: str
    count: int
    says: str
    cure: FixAction
    is_serious: bool
    examples: tuple[FindingExample, ...]


class SplitSummary(FrozenModel):
    """Files of one part, and how many rows of each label they hold."""

    name: str
    files: tuple[str, ...]
    rows: int
    labels: dict[str, int]


class LengthStats(FrozenModel):
    """How large something is over all texts."""

    least: int
    median: int
    most_of_95: int
    """95 % are at most this."""
    most: int


class DataReport(FrozenModel):
    """Everything that `whet data text` tells."""

    format: int = 1
    forms: tuple[str, ...]
    columns: str
    is_multi_label: bool
    rows: int
    parts: tuple[SplitSummary, ...]
    labels: dict[str, int]
    characters: LengthStats | None
    words: LengthStats | None
    findings: tuple[DataFinding, ...]


class CleanCopyResult(FrozenModel):
    """A cleaned copy, and the list of what was done."""

    files: tuple[str, ...]
    list_file: str
    rows: int
    kept: int
    changed: int


class FindingCollector:
    """Collects findings: counts all, keeps the first few rows of each."""

    MOST_EXAMPLES = 3

    def __init__(self) -> None:
        self.counts: dict[str, int] = dict.fromkeys(DEFECT_KINDS, 0)
        self._examples: dict[str, list[FindingExample]] = {kind: [] for kind in DEFECT_KINDS}

    def wants(self, kind: str) -> bool:
        """Whether another example would be kept."""
        return len(self._examples[kind]) < self.MOST_EXAMPLES

    def add(self, kind: str, example: FindingExample | None = None, *, count: int = 1) -> None:
        """Counts one, and keeps its example while there is room."""
        self.counts[kind] += count
        if example is not None and self.wants(kind):
            self._examples[kind].append(example)

    def done(self) -> tuple[DataFinding, ...]:
        """What was found, in the order of `DEFECT_KINDS`."""
        return tuple(
            DataFinding(
                kind=kind,
                count=count,
                says=DEFECT_KINDS[kind].says,
                cure=DEFECT_KINDS[kind].cure,
                is_serious=DEFECT_KINDS[kind].is_serious,
                examples=tuple(self._examples[kind]),
            )
            for kind, count in self.counts.items()
            if count
        )


_MAX_LISTED_LABELS = 12
_ACTION_TEXT = {"removed": "--fix removes", "changed": "--fix changes", "left": "left to you"}


def report_lines(report: DataReport) -> list[str]:
    """The whole report."""
    return [*_fact_lines(report), *_finding_lines(report.findings)]


def _fact_lines(report: DataReport) -> Iterator[str]:
    yield f"data      {format_plural(report.rows, 'row')} of {' and '.join(report.forms)}; {report.columns}"
    if len(report.parts) > 1 or report.parts[0].name != "all":
        yield "parts     " + ", ".join(f"{part.name} {part.rows:,}" for part in report.parts)
    shown = [f"{name} {count:,}" for name, count in list(report.labels.items())[:_MAX_LISTED_LABELS]]
    more = len(report.labels) - len(shown)
    several = "; a text may have several" if report.is_multi_label else ""
    yield f"labels    {len(report.labels):,}: {', '.join(shown)}{f' and {more:,} more' if more else ''}{several}"
    if report.characters is not None and report.words is not None:
        yield f"lengths   characters {_length_line(report.characters)}; words {_length_line(report.words)}"


def _length_line(spread: LengthStats) -> str:
    return f"{spread.least:,} to {spread.most:,}, median {spread.median:,}, 95 % up to {spread.most_of_95:,}"


def _finding_lines(findings: Sequence[DataFinding]) -> Iterator[str]:
    if not findings:
        yield "found     nothing"
        return
    serious = sum(finding.is_serious for finding in findings)
    kinds = "1 kind of defect" if len(findings) == 1 else f"{len(findings)} kinds of defects"
    yield f"found     {kinds}" + (f", {serious} serious (!)" if serious else "")
    wide = max(len(finding.kind) for finding in findings)
    for finding in findings:
        mark = "!" if finding.is_serious else " "
        yield f"  {mark} {finding.kind:<{wide}}  {finding.count:>7,}  {finding.says} ({_ACTION_TEXT[finding.cure]})"
        yield from (f"      {_example_line(example)}" for example in finding.examples)


def _example_line(example: FindingExample) -> str:
    other = f" and {example.other}" if example.other else ""
    return f"{example.where}{other}" + (f"  {example.shows}" if example.shows else "")


def fixed_lines(fixed: CleanCopyResult) -> list[str]:
    """What became of it."""
    removed, kept = fixed.rows - fixed.kept, f"{fixed.kept:,} of {format_plural(fixed.rows, 'row')}"
    return [
        f"wrote     {', '.join(fixed.files)}: {kept}, {fixed.changed:,} of them changed",
        f"          {fixed.list_file} lists the {removed:,} removed and every change, with the reason",
    ]


def serious_lines(findings: Sequence[DataFinding], *, where: str, most: int = 3) -> list[str]:
    """The serious findings in at most three lines, before a training."""
    serious = [finding for finding in findings if finding.is_serious]
    if not serious:
        return []
    told = [f"{finding.says}: {finding.count:,}" for finding in serious]
    if len(told) > most:
        told = [*told[: most - 1], "; ".join(told[most - 1 :])]
    return [f"warning: {line}" for line in (*told[:-1], f"{told[-1]} (whet data text {where} names the rows)")]
