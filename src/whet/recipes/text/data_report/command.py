"""How does the text recipe look at data: `whet data text`, and the short look before a training?"""

from pathlib import Path

from whet.recipes.recipe import DataInspection
from whet.recipes.text.config import TextConfig
from whet.recipes.text.data_report.clean_copy import check_leave, check_output
from whet.recipes.text.data_report.clean_copy import write_clean_copy as write_fixed
from whet.recipes.text.data_report.inspector import DatasetInspector
from whet.recipes.text.data_report.report import fixed_lines, report_lines


def report_on_data(config: TextConfig, path: Path, *, fix: Path | None, leave: tuple[str, ...]) -> DataInspection:
    """The report of a file or folder, and a cleaned copy of it if one is asked for."""
    inspection = DatasetInspector(path, overrides=config.column_overrides, separator=config.label_separator)
    check_leave(leave)
    if fix is not None:
        check_output(fix, inspection.ledger.sources)
    report = inspection.run()
    lines, told = report_lines(report), report.as_json()
    if fix is not None:
        fixed = write_fixed(inspection, fix, leave=frozenset(leave))
        lines, told = [*lines, *fixed_lines(fixed)], {**told, "fixed": fixed.as_json()}
    return DataInspection(lines=tuple(lines), as_json=told, num_findings=len(report.findings))
