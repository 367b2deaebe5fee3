"""What is one row of a file, before anybody knows which of its columns is the text?"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Part = Literal["train", "dev", "test"]
Form = Literal["JSON lines", "CSV", "TSV", "Parquet", "Arrow", "class folders"]

MOST_ROW_BYTES = 64 * 1024**2
"""A longer line is no row, and reading it whole could take all memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What is wrong with a row itself; `is_whole` rows can still be used."""

    kind: str
    """The kind of finding in a data report."""
    what: str
    """Follows "row 12 of FILE"."""
    got: str
    try_: str
    is_whole: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A file (or a folder of class folders) that holds rows of one part; None: of all parts, to be split."""

    path: Path
    form: Form
    part: Part | None
    delimiter: str = ""
    class_names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Of a column whose numbers stand for names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row: its cells by column, or the fault that left none."""

    line: int
    """Where it begins, counted from 1; in a form without lines the row's own number."""
    cells: dict[str, Any]
    raw: str = ""
    """As it stands in the file, without its line end; empty where a form has no lines."""
    ending: str = ""
    """`\\n`, `\\r\\n`, or nothing at the end of a file."""
    num_bytes: int = 0
    fault: Fault | None = None
    has_bom: bool = False
    """A byte order mark stands before it."""
    name: str = ""
    """Of the file, where a row is a file."""
