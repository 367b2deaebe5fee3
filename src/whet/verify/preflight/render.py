"""Render a check result as text, GitHub annotations or SARIF."""

from pathlib import Path
from typing import Any
from urllib.parse import quote

from whet.base.version import VERSION
from whet.verify.preflight.check import CheckResult
from whet.verify.preflight.findings import SEVERITIES, CheckFinding, Severity

_INDENT = " " * 10
_PAGE = "docs/check.md"
_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"
_LONGEST_CODE = 100


def render_text(checked: CheckResult) -> list[str]:
    """Worst first, each with its line and what to try."""
    where = f"{checked.device} ({checked.machine})" if checked.machine else checked.device
    how = "no number was computed" if checked.is_fake else "real numbers, a few samples"
    lines = [
        f"check     {checked.subject} for {where}, by torch {checked.torch}",
        f"traced    {checked.num_operators:,} operator calls, {checked.num_weights:,} parameters, "
        f"micro-batch {checked.num_samples}; {how}",
    ]
    for finding in checked.findings:
        lines += ["", f"{finding.severity:<9} {finding.what}", *_details(finding)]
    if checked.is_causal:
        lines += ["", "causal    yes: other tokens moved no output before them (real numbers, a few samples)"]
    if checked.fits:
        lines += ["", *(f"{'memory' if not number else '':<9} {fit.words}" for number, fit in enumerate(checked.fits))]
    if checked.why_no_fits:
        lines += ["", f"memory    not estimated: {checked.why_no_fits}"]
    lines += ["", f"found     {_counts(checked)}"]
    if checked.machine and checked.num_known_faults:
        lines.append(
            f"{_INDENT}{checked.num_known_faults} known wrong results apply to this machine: docs/hazards.md; "
            "those that were met are told above"
        )
    return lines


def _details(finding: CheckFinding) -> list[str]:
    often = f", {finding.count} times a step" if finding.count > 1 else ""
    place = finding.place
    if place is None:
        return [f"{_INDENT}in {finding.during}{often}", f"{_INDENT}try: {finding.try_}"]
    code = place.code if len(place.code) <= _LONGEST_CODE else place.code[: _LONGEST_CODE - 3] + "..."
    return [f"{_INDENT}{place}{often}: {code}", f"{_INDENT}try: {finding.try_}"]


def _counts(checked: CheckResult) -> str:
    counts = {severity: sum(f.severity == severity for f in checked.findings) for severity in SEVERITIES}
    told = [f"{count} {severity}{'s' if count > 1 else ''}" for severity, count in counts.items() if count]
    return ", ".join(told) or "nothing"


def render_github(checked: CheckResult) -> list[str]:
    """Workflow commands that put each finding beside its line."""
    return [
        f"::{_level(finding.severity, note='notice')} {_target(finding)}title={_escaped(finding.id, is_value=True)}::"
        + _escaped(f"{finding.what}; try: {finding.try_}")
        for finding in checked.findings
    ]


def _target(finding: CheckFinding) -> str:
    if finding.place is None:
        return ""
    return f"file={_escaped(finding.place.file, is_value=True)},line={finding.place.line},"


def _escaped(text: str, *, is_value: bool = False) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if is_value else text


def _level(severity: Severity, *, note: str) -> str:
    return note if severity == "note" else severity


def render_sarif(checked: CheckResult) -> dict[str, Any]:
    """The findings in the format that code hosts and editors read."""
    ids = sorted({finding.id for finding in checked.findings})
    return {
        "$schema": _SARIF,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "whet check",
                        "version": VERSION,
                        "rules": [{"id": id_, "help": {"text": f"see {_PAGE}"}} for id_ in ids],
                    }
                },
                "results": [_as_result(finding, checked, ids.index(finding.id)) for finding in checked.findings],
            }
        ],
    }


def _as_result(finding: CheckFinding, checked: CheckResult, index: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": finding.id,
        "ruleIndex": index,
        "level": finding.severity,
        "message": {"text": f"{finding.what}; try: {finding.try_}"},
    }
    # A code host refuses the whole file if one result has no place.
    place = finding.place or checked.model_at
    if place is not None:
        path = Path(place.file)
        region: dict[str, Any] = {"startLine": place.line}
        if place.code:
            region["snippet"] = {"text": place.code}
        location = {
            "artifactLocation": {"uri": path.as_uri() if path.is_absolute() else quote(path.as_posix())},
            "region": region,
        }
        result["locations"] = [{"physicalLocation": location}]
    return result
