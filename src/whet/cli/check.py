"""`whet check`: check whether a model can be trained on a device."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

import typer

from whet.base.errors import UsageError
from whet.base.version import VERSION
from whet.cli import output
from whet.cli.options import ConfigFile, Json, Settings

if TYPE_CHECKING:
    from whet.verify.preflight.check import PreflightResult
    from whet.verify.preflight.findings import PreflightFinding

_INDENT = " " * 10
_PAGE = "docs/check.md"
_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"
_LONGEST_CODE = 100


def check(
    target: Annotated[
        str,
        typer.Argument(metavar="MODEL|RECIPE", help="text, a Python file with model() or recipe(), or module:factory."),
    ],
    settings: Settings = None,
    device: Annotated[
        Literal["mps", "cuda", "cpu"] | None,
        typer.Option("--for", help="The device. Default: that of --machine, or mps."),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE", help="Consider the memory and known faults of a machine, such as m2-air-8gb."
        ),
    ] = None,
    torch: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="A torch version, such as 2.15. It need not be installed."),
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Check that the model is causal.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 1 for warnings too.")] = False,
    config: ConfigFile = None,
    json: Json = False,
    sarif: Annotated[bool, typer.Option("--sarif", help="Print the findings as SARIF 2.1.0.")] = False,
) -> None:
    """Check whether a model can be trained on a device.

    \b
    whet check text --machine m2-air-8gb
    whet check my_model.py --for mps
    whet check package.models:make --for cuda --strict
    whet check my_model.py --torch 2.15

    The device itself is not needed. MODEL is a function that returns (model, inputs) or (model, inputs, loss), where
    loss is called with the model and the inputs. Two optimizer steps are traced with fake tensors, so that checking
    even a large model takes only seconds and almost no memory. The check reports missing operators, unsupported dtypes
    and shapes, calls that make Python wait for the device, code that requires CUDA, weights in a problematic layout,
    and known faults of the machine that affect the model. Each finding has a line number and a suggested fix.

    The exit code is 1 if something would stop the run, and with --strict also if something slows it down or may be
    wrong.
    """
    from whet.api.verify import check as check_model

    if json and sarif:
        raise UsageError("choose one output format", got="--json and --sarif", try_="one of them")
    with output.user_output_to_stderr():
        result = check_model(
            target, settings or (), device=device, machine=machine, config=config, is_causal=causal, torch=torch
        )
    if json:
        output.result_json(result.as_json())
    elif sarif:
        output.result_json(render_sarif(result))
    else:
        output.result("\n".join(render_text(result)))
    if not result.passes(is_strict=strict):
        raise typer.Exit(1)


# --- Text and SARIF --------------------------------------------------------------------------------------------------


def render_text(result: "PreflightResult") -> list[str]:
    """Render the result as lines of text. Each finding has its line and a suggestion."""
    where = f"{result.device} ({result.machine})" if result.machine else result.device
    how = "fake tensors, nothing computed" if result.is_fake else "real tensors, a few samples"
    lines = [
        f"check     {result.name} for {where}, by torch {result.torch}",
        f"traced    {result.num_operators:,} operator calls, {result.num_parameters:,} parameters, "
        f"micro-batch {result.num_samples}; {how}",
    ]
    for finding in result.findings:
        lines += ["", f"{finding.severity:<9} {finding.what}", *_details(finding)]
    if result.is_causal:
        lines += ["", "causal    yes: changing later tokens changes no earlier output (real tensors, a few samples)"]
    if result.fits:
        lines += ["", *(f"{'memory' if not number else '':<9} {fit.summary}" for number, fit in enumerate(result.fits))]
    if result.why_no_fits:
        lines += ["", f"memory    not estimated: {result.why_no_fits}"]
    lines += ["", f"result    {_counts(result)}"]
    if result.machine and result.num_known_faults:
        is_affected = any(finding.id.startswith("known-fault/") for finding in result.findings)
        shown = "those that affect this model are listed above" if is_affected else "none was found in this model"
        lines.append(
            f"{_INDENT}{result.num_known_faults} known wrong results apply to this machine (docs/hazards.md); {shown}"
        )
    return lines


def _details(finding: "PreflightFinding") -> list[str]:
    often = f", {finding.count} times per step" if finding.count > 1 else ""
    place = finding.place
    if place is None:
        return [f"{_INDENT}in {finding.during}{often}", f"{_INDENT}try: {finding.try_}"]
    code = place.code if len(place.code) <= _LONGEST_CODE else place.code[: _LONGEST_CODE - 3] + "..."
    return [f"{_INDENT}{place}{often}: {code}", f"{_INDENT}try: {finding.try_}"]


def _counts(result: "PreflightResult") -> str:
    from whet.verify.preflight.findings import SEVERITIES

    counts = {severity: sum(f.severity == severity for f in result.findings) for severity in SEVERITIES}
    parts = [f"{count} {severity}{'s' if count > 1 else ''}" for severity, count in counts.items() if count]
    return ", ".join(parts) or "no findings"


def render_sarif(result: "PreflightResult") -> dict[str, Any]:
    """Render the findings as SARIF 2.1.0, which code hosts and editors can read."""
    ids = sorted({finding.id for finding in result.findings})
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
                "results": [_as_result(finding, result, ids.index(finding.id)) for finding in result.findings],
            }
        ],
    }


def _as_result(finding: "PreflightFinding", result: "PreflightResult", index: int) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "ruleId": finding.id,
        "ruleIndex": index,
        "level": finding.severity,
        "message": {"text": f"{finding.what}; try: {finding.try_}"},
    }
    # GitHub rejects the whole file if one result has no location.
    place = finding.place or result.model_at
    if place is not None:
        path = Path(place.file)
        region: dict[str, Any] = {"startLine": place.line}
        if place.code:
            region["snippet"] = {"text": place.code}
        location = {
            "artifactLocation": {"uri": path.as_uri() if path.is_absolute() else quote(path.as_posix())},
            "region": region,
        }
        entry["locations"] = [{"physicalLocation": location}]
    return entry
