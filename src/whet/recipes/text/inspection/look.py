"""How does the text recipe look at data: `whet data text`, and the short look before a training?"""

from pathlib import Path

from whet.recipes.looking import DataLook
from whet.recipes.text.config import TextConfig
from whet.recipes.text.inspection.fixing import fix as write_fixed
from whet.recipes.text.inspection.fixing import refuse_leave, refuse_out
from whet.recipes.text.inspection.inspect import Inspection
from whet.recipes.text.inspection.words import fixed_lines, report_lines


def look_at_data(config: TextConfig, path: Path, *, fix: Path | None, leave: tuple[str, ...]) -> DataLook:
    """The report of a file or folder, and a cleaned copy of it if one is asked for."""
    inspection = Inspection(path, wishes=config.column_wishes, separator=config.label_separator)
    refuse_leave(leave)
    if fix is not None:
        refuse_out(fix, inspection.ledger.sources)
    report = inspection.run()
    lines, told = report_lines(report), report.as_json()
    if fix is not None:
        fixed = write_fixed(inspection, fix, leave=frozenset(leave))
        lines, told = [*lines, *fixed_lines(fixed)], {**told, "fixed": fixed.as_json()}
    return DataLook(lines=tuple(lines), as_json=told, num_findings=len(report.findings))
