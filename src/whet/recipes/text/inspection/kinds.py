"""Which defects of labelled texts are known, and what does `--fix` do about each?"""

from typing import Literal, NamedTuple

Cure = Literal["removed", "changed", "left"]


class Kind(NamedTuple):
    """A kind of defect."""

    says: str
    """What is counted."""
    cure: Cure
    """What `--fix` does: takes the row out, changes it, or leaves it to you."""
    is_serious: bool = False
    """Whether a training should not start without having said so."""


KINDS: dict[str, Kind] = {
    # A row whose text cannot be had.
    "not-utf8": Kind("rows that are not UTF-8", "removed"),
    "not-a-row": Kind("lines that are no JSON object", "removed"),
    "truncated": Kind("rows that are cut short: a field, a quote or a bracket is missing", "removed"),
    "columns": Kind("rows with more fields than the header", "removed"),
    "long": Kind("rows of 1 MB or more", "removed"),
    "header": Kind("rows that are headers", "removed", is_serious=True),
    # A text that says nothing, or something else than was meant.
    "empty": Kind("empty texts", "removed"),
    "spaces": Kind("texts of spaces only", "removed"),
    "punctuation": Kind("texts of punctuation only", "removed"),
    "nul": Kind("texts with NUL bytes", "changed"),
    "control": Kind("texts with control characters", "changed"),
    "bom": Kind("byte order marks at the start of a file or in a text", "changed"),
    "line-ends": Kind("files that end lines in two ways", "changed"),
    "mojibake": Kind("texts with UTF-8 that was read in another encoding", "changed"),
    "lost-characters": Kind("texts with U+FFFD, which stands for a lost character", "left"),
    "html": Kind("texts with remains of HTML", "changed"),
    "script": Kind("texts in another script than the rest", "left"),
    "label-in-text": Kind("texts that say their label", "removed", is_serious=True),
    "label-named": Kind("texts with the name of their label, which no text of another label has", "left"),
    # Labels.
    "no-label": Kind("rows without a label", "removed"),
    "misspelt-label": Kind("labels that are probably another one, misspelt", "changed", is_serious=True),
    "single-label": Kind("labels that are seen once", "removed"),
    "one-part-label": Kind("labels that only one part has", "left", is_serious=True),
    # The same text again.
    "duplicate": Kind("rows that repeat an earlier one of their part", "removed"),
    "folded-duplicate": Kind(
        "rows that repeat an earlier one of their part, but for case, spaces and broken characters", "removed"
    ),
    "leak": Kind("held-out texts that another part has too", "removed", is_serious=True),
    "folded-leak": Kind(
        "held-out texts that another part has too, but for case, spaces and broken characters", "removed", True
    ),
    "two-labels": Kind("rows whose text has another label in another row", "removed", is_serious=True),
    "group-leak": Kind("groups that are in several parts", "left", is_serious=True),
}
"""In the order in which they are told."""
