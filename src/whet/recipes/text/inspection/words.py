"""How is a data report said: on a screen, and in three lines before a training?"""

from collections.abc import Iterator, Sequence

from whet.base.units import show_some
from whet.recipes.text.inspection.report import DataReport, Example, Finding, Fixed, Spread

_MOST_LABELS = 12
_CURES = {"removed": "--fix removes", "changed": "--fix changes", "left": "left to you"}


def report_lines(report: DataReport) -> list[str]:
    """The whole report."""
    return [*_facts(report), *_found(report.findings)]


def _facts(report: DataReport) -> Iterator[str]:
    yield f"data      {show_some(report.rows, 'row')} of {' and '.join(report.forms)}; {report.columns}"
    if len(report.parts) > 1 or report.parts[0].name != "all":
        yield "parts     " + ", ".join(f"{part.name} {part.rows:,}" for part in report.parts)
    shown = [f"{name} {count:,}" for name, count in list(report.labels.items())[:_MOST_LABELS]]
    more = len(report.labels) - len(shown)
    several = "; a text may have several" if report.is_multi_label else ""
    yield f"labels    {len(report.labels):,}: {', '.join(shown)}{f' and {more:,} more' if more else ''}{several}"
    if report.characters is not None and report.words is not None:
        yield f"lengths   characters {_spread(report.characters)}; words {_spread(report.words)}"


def _spread(spread: Spread) -> str:
    return f"{spread.least:,} to {spread.most:,}, median {spread.median:,}, 95 % up to {spread.most_of_95:,}"


def _found(findings: Sequence[Finding]) -> Iterator[str]:
    if not findings:
        yield "found     nothing"
        return
    serious = sum(finding.is_serious for finding in findings)
    kinds = "1 kind of defect" if len(findings) == 1 else f"{len(findings)} kinds of defects"
    yield f"found     {kinds}" + (f", {serious} serious (!)" if serious else "")
    wide = max(len(finding.kind) for finding in findings)
    for finding in findings:
        mark = "!" if finding.is_serious else " "
        yield f"  {mark} {finding.kind:<{wide}}  {finding.count:>7,}  {finding.says} ({_CURES[finding.cure]})"
        yield from (f"      {_example(example)}" for example in finding.examples)


def _example(example: Example) -> str:
    other = f" and {example.other}" if example.other else ""
    return f"{example.where}{other}" + (f"  {example.shows}" if example.shows else "")


def fixed_lines(fixed: Fixed) -> list[str]:
    """What became of it."""
    removed, kept = fixed.rows - fixed.kept, f"{fixed.kept:,} of {show_some(fixed.rows, 'row')}"
    return [
        f"wrote     {', '.join(fixed.files)}: {kept}, {fixed.changed:,} of them changed",
        f"          {fixed.list_file} lists the {removed:,} removed and every change, with the reason",
    ]


def serious_lines(findings: Sequence[Finding], *, where: str, most: int = 3) -> list[str]:
    """The serious findings in at most three lines, before a training."""
    serious = [finding for finding in findings if finding.is_serious]
    if not serious:
        return []
    told = [f"{finding.says}: {finding.count:,}" for finding in serious]
    if len(told) > most:
        told = [*told[: most - 1], "; ".join(told[most - 1 :])]
    return [f"warning: {line}" for line in (*told[:-1], f"{told[-1]} (whet data text {where} names the rows)")]
