"""The data report: kinds of defects, findings, and their formatting for the terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from pydantic import Field

from whet.base.model import FrozenModel
from whet.base.units import format_plural

FixAction = Literal["removed", "changed", "left"]


class DefectKind(NamedTuple):
    description: str
    """The description of the rows, texts or labels that are counted."""
    action: FixAction
    """The action of `--fix`: remove the row, change it, or leave it."""
    is_serious: bool = False
    """Whether the defect is reported before training starts."""


DEFECT_KINDS: dict[str, DefectKind] = {
    # Rows that cannot be read.
    "not-utf8": DefectKind("rows that are not UTF-8", "removed"),
    "not-a-row": DefectKind("lines that are not JSON objects", "removed"),
    "truncated": DefectKind("truncated rows: a field, a quote or a bracket is missing", "removed"),
    "columns": DefectKind("rows with more fields than the header", "removed"),
    "long": DefectKind("rows of 1 MB or more", "removed"),
    "header": DefectKind("rows that are headers", "removed", is_serious=True),
    # Defects of texts.
    "empty": DefectKind("empty texts", "removed"),
    "spaces": DefectKind("texts of white space only", "removed"),
    "punctuation": DefectKind("texts of punctuation only", "removed"),
    "nul": DefectKind("texts with NUL bytes", "changed"),
    "control": DefectKind("texts with control characters", "changed"),
    "bom": DefectKind("byte order marks at the start of a file or in a text", "changed"),
    "line-endings": DefectKind("files with mixed line endings", "changed"),
    "mojibake": DefectKind("texts with UTF-8 decoded in another encoding", "changed"),
    "lost-characters": DefectKind("texts with U+FFFD, which replaces lost characters", "left"),
    "html": DefectKind("texts with HTML tags or entities", "changed"),
    "script": DefectKind("texts in another script than the rest", "left"),
    "label-in-text": DefectKind("texts that state their label", "removed", is_serious=True),
    "label-named": DefectKind("texts with the name of their label, which no text of another label contains", "left"),
    # Defects of labels.
    "no-label": DefectKind("rows without a label", "removed"),
    "misspelled-label": DefectKind("labels that are probably misspelled", "changed", is_serious=True),
    "single-label": DefectKind("labels that occur once", "removed"),
    "one-split-label": DefectKind("labels that occur in one split only", "left", is_serious=True),
    # Duplicate and contradictory rows.
    "duplicate": DefectKind("rows that repeat an earlier row of their split", "removed"),
    "near-duplicate": DefectKind(
        "rows that repeat an earlier row of their split except for case, white space and broken characters", "removed"
    ),
    "leak": DefectKind("held-out texts that also occur in another split", "removed", is_serious=True),
    "near-leak": DefectKind(
        "held-out texts that also occur in another split except for case, white space and broken characters",
        "removed",
        is_serious=True,
    ),
    "two-labels": DefectKind("rows whose text has another label in another row", "removed", is_serious=True),
    "group-leak": DefectKind("groups that are in several splits", "left", is_serious=True),
}
"""The kinds of defects, in the order of the report."""


class FindingExample(FrozenModel):
    """An example of a finding."""

    where: str
    """The location as FILE:LINE."""
    other: str | None = None
    """The location of the row that this row repeats or contradicts."""
    shows: str | None = None
    """An excerpt of the text, or the reason."""


class DataFinding(FrozenModel):
    """A kind of defect and how often it occurs."""

    kind: str
    count: int
    description: str
    action: FixAction
    is_serious: bool
    examples: tuple[FindingExample, ...]
    breakdown: dict[str, int] = Field(default_factory=dict)
    """Leaks by pair of splits; contradictory labels by texts and by rows."""

    @property
    def breakdown_text(self) -> str:
        """The breakdown as text, such as "test in train 47, test in val 2"."""
        return ", ".join(f"{name} {count:,}" for name, count in self.breakdown.items())


class SplitSummary(FrozenModel):
    """The files of a split, and the number of rows of each label."""

    name: str
    files: tuple[str, ...]
    rows: int
    labels: dict[str, int]


class LengthStats(FrozenModel):
    """The distribution of a length over all texts."""

    min: int
    median: int
    p95: int
    max: int


class DataReport(FrozenModel):
    """The result of `whet data text`."""

    format: int = 1
    formats: tuple[str, ...]
    columns: str
    is_multi_label: bool
    rows: int
    splits: tuple[SplitSummary, ...]
    labels: dict[str, int]
    characters: LengthStats | None
    words: LengthStats | None
    findings: tuple[DataFinding, ...]


class CleanCopyResult(FrozenModel):
    """A cleaned copy and the list of changes."""

    files: tuple[str, ...]
    list_file: str
    rows: int
    kept: int
    changed: int


class FindingCollector:
    """Counts defects and keeps the first few examples of each kind."""

    MAX_EXAMPLES = 3

    def __init__(self) -> None:
        self._counts: dict[str, int] = dict.fromkeys(DEFECT_KINDS, 0)
        self._examples: dict[str, list[FindingExample]] = {kind: [] for kind in DEFECT_KINDS}

    def needs_example(self, kind: str) -> bool:
        """Return whether another example would be kept. Callers use this to avoid building unused examples."""
        return len(self._examples[kind]) < self.MAX_EXAMPLES

    def add(self, kind: str, example: FindingExample | None = None, *, count: int = 1) -> None:
        self._counts[kind] += count
        if example is not None and self.needs_example(kind):
            self._examples[kind].append(example)

    def findings(self, breakdown: Mapping[str, Mapping[str, int]] | None = None) -> tuple[DataFinding, ...]:
        """Return the kinds of defects that were counted, in the order of `DEFECT_KINDS`."""
        parts = breakdown or {}
        return tuple(
            DataFinding(
                kind=kind,
                count=count,
                description=DEFECT_KINDS[kind].description,
                action=DEFECT_KINDS[kind].action,
                is_serious=DEFECT_KINDS[kind].is_serious,
                examples=tuple(self._examples[kind]),
                breakdown=dict(parts.get(kind, {})),
            )
            for kind, count in self._counts.items()
            if count
        )


# --- formatting -------------------------------------------------------------------------------------------------------

_MAX_LISTED_LABELS = 12
_ACTION_TEXT = {"removed": "--fix removes", "changed": "--fix changes", "left": "not changed by --fix"}


def report_lines(report: DataReport) -> list[str]:
    """Format a report for the terminal."""
    return [*_fact_lines(report), *_finding_lines(report.findings)]


def clean_copy_lines(result: CleanCopyResult) -> list[str]:
    """Format the result of `--fix` for the terminal."""
    removed, kept = result.rows - result.kept, f"{result.kept:,} of {format_plural(result.rows, 'row')}"
    return [
        f"wrote     {', '.join(result.files)}: {kept}, {result.changed:,} of them changed",
        f"          {result.list_file} lists the {removed:,} removed rows and every change, with the reason",
    ]


def serious_lines(findings: Sequence[DataFinding], *, where: str, max_lines: int = 3) -> list[str]:
    """Format the serious findings as at most `max_lines` warnings, which are shown before training."""
    serious = [finding for finding in findings if finding.is_serious]
    if not serious:
        return []
    parts = [f" ({finding.breakdown_text})" if finding.breakdown else "" for finding in serious]
    lines = [f"{finding.description}: {finding.count:,}{part}" for finding, part in zip(serious, parts, strict=True)]
    if len(lines) > max_lines:
        lines = [*lines[: max_lines - 1], "; ".join(lines[max_lines - 1 :])]
    return [f"warning: {line}" for line in (*lines[:-1], f"{lines[-1]} (whet data text {where} lists the rows)")]


def _fact_lines(report: DataReport) -> Iterator[str]:
    yield f"data      {format_plural(report.rows, 'row')} of {' and '.join(report.formats)}; {report.columns}"
    if len(report.splits) > 1 or report.splits[0].name != "all":
        yield "splits    " + ", ".join(f"{split.name} {split.rows:,}" for split in report.splits)
    shown = [f"{name} {count:,}" for name, count in list(report.labels.items())[:_MAX_LISTED_LABELS]]
    more = len(report.labels) - len(shown)
    multi = "; multi-label" if report.is_multi_label else ""
    yield f"labels    {len(report.labels):,}: {', '.join(shown)}{f' and {more:,} more' if more else ''}{multi}"
    if report.characters is not None and report.words is not None:
        yield f"lengths   characters {_stats_text(report.characters)}; words {_stats_text(report.words)}"


def _stats_text(stats: LengthStats) -> str:
    return f"{stats.min:,} to {stats.max:,}, median {stats.median:,}, 95 % up to {stats.p95:,}"


def _finding_lines(findings: Sequence[DataFinding]) -> Iterator[str]:
    if not findings:
        yield "defects   none"
        return
    num_serious = sum(finding.is_serious for finding in findings)
    kinds = "1 kind" if len(findings) == 1 else f"{len(findings)} kinds"
    yield f"defects   {kinds}" + (f", {num_serious} serious (!)" if num_serious else "")
    width = max(len(finding.kind) for finding in findings)
    for finding in findings:
        mark = "!" if finding.is_serious else " "
        action = _ACTION_TEXT[finding.action]
        yield f"  {mark} {finding.kind:<{width}}  {finding.count:>7,}  {finding.description} ({action})"
        if finding.breakdown:
            yield f"      {finding.breakdown_text}"
        yield from (f"      {_example_text(example)}" for example in finding.examples)


def _example_text(example: FindingExample) -> str:
    other = f" and {example.other}" if example.other else ""
    return f"{example.where}{other}" + (f"  {example.shows}" if example.shows else "")
