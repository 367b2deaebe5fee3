"""The result of `whet search`, stored in the folder of the search."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from whet.base.errors import UsageError
from whet.run import durable, strict_json
from whet.run.strict_json import StrictModel

FORMAT_VERSION = 1
RESULT_FILE = "result.json"

TrialState = Literal["complete", "pruned", "infeasible", "failed", "running", "waiting"]


class SearchTrial(StrictModel):
    """One trial of a search, with its settings and its result."""

    number: int
    state: TrialState
    value: float | None = None
    """Goal metric at the end of the trial or at the step where it was pruned; None if it has no value."""
    settings: dict[str, Any] = Field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0
    peak_bytes: int | None = None
    """Largest memory reading of the trial."""
    run: str | None = None
    machine: str | None = None
    note: str = ""
    """The reason why the trial has no value."""


class SearchCandidate(StrictModel):
    """One of the best trials, trained again with seeds that the search did not use."""

    number: int
    settings: dict[str, Any]
    values: dict[str, float] = Field(default_factory=dict)
    """Goal metric by seed."""
    lost: int = 0
    """Number of seeds without a value."""
    mean: float
    low: float | None = None
    high: float | None = None
    """Upper bound of the 95 % confidence interval of the mean over seeds (Student's t); None for a single seed."""


class SearchResult(StrictModel):
    """The result of a search."""

    format_version: int = FORMAT_VERSION
    kind: Literal["whet search"] = "whet search"
    name: str
    recipe: str
    goal: str
    is_higher_better: bool = True
    space: tuple[str, ...] = ()
    """Search space, as command line arguments."""
    fixed: dict[str, Any] = Field(default_factory=dict)
    subset: float = 1.0
    seeds: int = 3
    sampler: str = ""
    pruner: str = ""
    storage: str = ""
    resource: str = "epochs"
    trials: tuple[SearchTrial, ...] = ()
    continued: int = 0
    """Number of trials that were interrupted and resumed."""
    importance: dict[str, float] = Field(default_factory=dict)
    candidates: tuple[SearchCandidate, ...] = ()
    """Candidates, best first."""
    difference_low: float | None = None
    difference_high: float | None = None
    """Upper bound of the 95 % interval of the difference between the winner and the runner-up on the same seeds."""
    is_confirmed: bool = False
    """Whether all seeds were trained, including those without a value."""
    seconds: float = 0.0
    created: str = ""

    @property
    def winner(self) -> SearchCandidate | None:
        """The best candidate; None if no trial was completed."""
        return self.candidates[0] if self.candidates else None

    @property
    def is_clear(self) -> bool:
        """Whether the winner is significantly better than the next candidate."""
        low, high = self.difference_low, self.difference_high
        # The whole interval must lie on the side of 0 that favors the winner.
        bound = low if self.is_higher_better else (None if high is None else -high)
        return bound is not None and bound > 0


def write_search(folder: Path, result: SearchResult) -> Path:
    path = folder / RESULT_FILE
    durable.write_file(path, data=(strict_json.encode(result.as_json(), pretty=True) + "\n").encode())
    return path


def is_search(folder: Path) -> bool:
    """Return whether a folder contains the result of a search."""
    return (folder / RESULT_FILE).is_file()


def read_search(folder: Path) -> SearchResult:
    path = folder / RESULT_FILE
    if not path.is_file():
        raise UsageError("no search result here", got=str(folder), try_="whet search RECIPE ... --name NAME")
    try:
        fields = strict_json.decode(path.read_bytes())
        if fields.get("format_version") != FORMAT_VERSION:
            raise ValueError(f"format {fields.get('format_version')}; this is {FORMAT_VERSION}")
    except (OSError, ValueError) as error:
        raise UsageError(
            "cannot read the search result",
            got=f"{path}: {error}"[:300],
            try_="the same `whet search` with the same --name, which writes it again",
        ) from None
    return SearchResult.from_json(fields, where=path)
