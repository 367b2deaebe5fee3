"""Generate the page of Macs from the doctor files that their owners sent (docs/macs/*.json)."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from docs_hazards import table

from whet.base.units import format_bytes
from whet.doctor.redaction import redact_identifiers
from whet.doctor.report import DoctorReport

MAX_BYTES = 64_000

_HEAD = """# Send a doctor file

whet was written without a Mac. A file from yours says what no simulation can: which operators are there, which
results are wrong, whether a resumed run is exact, and how fast it is.

## Send a file

```console
$ whet doctor --json doctor.json
```

It takes two minutes at most; close other programs, or the speeds are too low. Read the file before you send it: it is
text, smaller than 64 kB, with a line for each check. It holds the chip and the model, cores, memory, the versions of
macOS, Python, torch and a few libraries, power, heat and free memory at that time, and the results. It holds no name of
you or your computer, no path, no serial number, no address and no name of another program. If you find one, that is a
bug.

Attach it to an issue. Or add it as `docs/macs/CHIP-MEMORY-DATE.json`, for instance `m2-8gb-2027-01-31.json`, run
`make docs`, which refuses a file that is simulated, too large or not private, and open a pull request.

## Received

"""
_NONE = "None yet. Every statement about MPS in these pages comes from PyTorch's sources and issues, or is simulated.\n"


def macs_page(folder: Path) -> str:
    """Return the page: how to send a file, and one row for each that was received."""
    rows = [_row(path, read_report(path)) for path in sorted(folder.glob("*.json"))]
    header = ("Mac", "macOS", "torch", "checks", "problems", "matrix products", "training step", "file")
    return _HEAD + (table(header, rows) if rows else _NONE)


def read_report(path: Path) -> DoctorReport:
    """Return a report that may be published. Exits with the reason if it may not."""
    data = json.loads(path.read_text())
    report = DoctorReport.from_json(data, where=path)
    if report.is_virtual or report.device != "mps":
        sys.exit(f"error: {path.name} is not about a Mac's GPU\n  got: {report.device}, simulated: {report.is_virtual}")
    if path.stat().st_size > MAX_BYTES:
        sys.exit(f"error: {path.name} is larger than {MAX_BYTES} bytes\n  got: {path.stat().st_size}")
    for text in _texts(data):
        if redact_identifiers(text) != text:
            sys.exit(f"error: {path.name} contains a path or an identifier\n  got: {text}")
    return report


def _texts(value: object) -> Iterator[str]:
    """Yield every string of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def _row(path: Path, report: DoctorReport) -> tuple[str, ...]:
    machine = report.machine
    memory = "" if machine.memory_bytes is None else f", {format_bytes(machine.memory_bytes)}"
    what = {check.name: check.what for check in report.checks if check.verdict == "good"}
    run = [check for check in report.checks if check.verdict not in ("skipped", "not applicable")]
    problems = "; ".join(f"{check.group}: {check.name}" for check in report.problems)
    return (
        f"{machine.model or machine.chip or 'unknown'}, {machine.chip or 'unknown chip'}{memory}",
        machine.os.version or "unknown",
        machine.torch.version or "unknown",
        f"{len(run) - len(report.problems)} of {len(run)} good" + (" (quick)" if report.is_quick else ""),
        problems or "none",
        what.get("matrix product", "not measured"),
        what.get("training step, small", "not measured"),
        f"[{path.stem}](macs/{path.name})",
    )
