"""What shows only when all rows are seen: labels that are not meant, mixed line ends, other scripts, telling names?"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from whet.base.units import show_some
from whet.recipes.text.inspection import label_checks
from whet.recipes.text.inspection.label_in_text import Names
from whet.recipes.text.inspection.ledger import Ledger, merged
from whet.recipes.text.inspection.report import Example, Findings
from whet.recipes.text.inspection.scripts import SCRIPTS

_MAIN_SCRIPT_SHARE = 0.95
"""Where fewer texts are in one script, several are meant."""

Counts = Counter[tuple[str, str]]
"""Rows by label and part."""


class Verdict(NamedTuple):
    """What is to become of labels."""

    meant: dict[str, str]
    """Misspelt ones, with what they should be."""
    doomed: dict[str, str]
    """Those whose rows `--fix` takes out, with the kind."""


def look_at_labels(
    counts: Counts, *, first: Mapping[str, int], label_column: str | None, ledger: Ledger, findings: Findings
) -> Verdict:
    """Tells of labels that are probably not meant; `first` names a row of each."""
    totals = merged(counts)

    def tell(kind: str, name: str, shows: str, *, count: int = 1) -> None:
        findings.add(kind, Example(where=ledger.where(first[name]), shows=shows), count=count)

    headers = label_checks.header_labels(totals, label_column=label_column)
    named = {name: count for name, count in sorted(totals.items()) if name not in headers}
    meant = label_checks.misspelt(named)
    alone = label_checks.one_part_labels(counts)
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
            tell("one-part-label", name, f"{name!r} only in {alone[name]} ({show_some(totals[name], 'row')})")
    return Verdict(meant, doomed)


def look_at_line_ends(
    endings: Mapping[int, Counter[str]], others: Mapping[int, int], *, ledger: Ledger
) -> list[Example]:
    """Files that end lines in two ways; `others` names a row in which the second way is seen."""
    return [
        Example(
            where=ledger.where(row),
            shows=", ".join(f"{count:,} times {ending!r}" for ending, count in endings[source].most_common()),
        )
        for source, row in others.items()
    ]


def look_at_scripts(ledger: Ledger, findings: Findings) -> None:
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
            findings.add("script", Example(where=ledger.where(row), shows=shows) if wanted else None)


def look_at_names(names: Names, counts: Counts, *, ledger: Ledger, findings: Findings) -> None:
    """Tells of labels whose name stands in their own texts alone."""
    for label, rows in names.telling(merged(counts)).items():
        findings.add("label-named", count=names.own[label] - len(rows))
        for row in rows:
            findings.add("label-named", Example(where=ledger.where(row), shows=f"label {label!r}"))
