"""What does a data report hold? Facts and findings, each finding with its number and a few rows."""

from whet.base.record import Record
from whet.recipes.text.inspection.kinds import KINDS, Cure


class Example(Record):
    """A row that shows a finding."""

    where: str
    """FILE:LINE."""
    other: str | None = None
    """The row that it repeats or contradicts."""
    shows: str | None = None
    """A piece of the text, or what is wrong in words."""


class Finding(Record):
    """A kind of defect with how often it was found."""

    kind: str
    count: int
    says: str
    cure: Cure
    is_serious: bool
    examples: tuple[Example, ...]


class Part(Record):
    """Files of one part, and how many rows of each label they hold."""

    name: str
    files: tuple[str, ...]
    rows: int
    labels: dict[str, int]


class Spread(Record):
    """How large something is over all texts."""

    least: int
    median: int
    most_of_95: int
    """95 % are at most this."""
    most: int


class DataReport(Record):
    """Everything that `whet data text` tells."""

    format: int = 1
    forms: tuple[str, ...]
    columns: str
    is_multi_label: bool
    rows: int
    parts: tuple[Part, ...]
    labels: dict[str, int]
    characters: Spread | None
    words: Spread | None
    findings: tuple[Finding, ...]


class Fixed(Record):
    """A cleaned copy, and the list of what was done."""

    files: tuple[str, ...]
    list_file: str
    rows: int
    kept: int
    changed: int


class Findings:
    """Collects findings: counts all, keeps the first few rows of each."""

    MOST_EXAMPLES = 3

    def __init__(self) -> None:
        self.counts: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._examples: dict[str, list[Example]] = {kind: [] for kind in KINDS}

    def wants(self, kind: str) -> bool:
        """Whether another example would be kept."""
        return len(self._examples[kind]) < self.MOST_EXAMPLES

    def add(self, kind: str, example: Example | None = None, *, count: int = 1) -> None:
        """Counts one, and keeps its example while there is room."""
        self.counts[kind] += count
        if example is not None and self.wants(kind):
            self._examples[kind].append(example)

    def done(self) -> tuple[Finding, ...]:
        """What was found, in the order of `KINDS`."""
        return tuple(
            Finding(
                kind=kind,
                count=count,
                says=KINDS[kind].says,
                cure=KINDS[kind].cure,
                is_serious=KINDS[kind].is_serious,
                examples=tuple(self._examples[kind]),
            )
            for kind, count in self.counts.items()
            if count
        )
