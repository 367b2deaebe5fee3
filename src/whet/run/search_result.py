"""The result of `whet search`, which it writes into its folder."""

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
    """One trial."""

    number: int
    state: TrialState
    value: float | None = None
    """The goal at its end; of a pruned trial where it was stopped."""
    settings: dict[str, Any] = Field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0
    run: str | None = None
    machine: str | None = None
    note: str = ""
    """Why it has no value."""


class SearchCandidate(StrictModel):
    """One of the best trials, trained again with seeds that the search did not use."""

    number: int
    settings: dict[str, Any]
    values: dict[str, float] = Field(default_factory=dict)
    """The goal for each of those seeds."""
    lost: int = 0
    """The number of those seeds without a value."""
    mean: float
    low: float | None = None
    high: float | None = None
    """The 95 % confidence interval of the mean over seeds (Student's t); None with fewer than two seeds."""


class SearchResult(StrictModel):
    """The result of a search."""

    format_version: int = FORMAT_VERSION
    kind: Literal["whet search"] = "whet search"
    name: str
    recipe: str
    goal: str
    is_higher_better: bool = True
    space: tuple[str, ...] = ()
    """As command line arguments."""
    fixed: dict[str, Any] = Field(default_factory=dict)
    subset: float = 1.0
    seeds: int = 3
    sampler: str = ""
    pruner: str = ""
    storage: str = ""
    resource: str = "epochs"
    trials: tuple[SearchTrial, ...] = ()
    continued: int = 0
    """Trials that were killed or stopped, and resumed."""
    importance: dict[str, float] = Field(default_factory=dict)
    candidates: tuple[SearchCandidate, ...] = ()
    """The best first."""
    difference_low: float | None = None
    difference_high: float | None = None
    """95 % confidence interval of the difference between the winner and the next candidate on the same seeds."""
    is_confirmed: bool = False
    """Whether all seeds were trained, with or without a value."""
    seconds: float = 0.0
    created: str = ""

    @property
    def winner(self) -> SearchCandidate | None:
        """The best candidate; None where no trial was completed."""
        return self.candidates[0] if self.candidates else None

    @property
    def is_clear(self) -> bool:
        """Whether the winner is better than the next candidate by more than the noise of seeds."""
        low, high = self.difference_low, self.difference_high
        bound = low if self.is_higher_better else (None if high is None else -high)
        return bound is not None and bound > 0


def write_search(folder: Path, result: SearchResult) -> Path:
    """Write the result into the folder of its search."""
    path = folder / RESULT_FILE
    durable.write_file(path, data=(strict_json.encode(result.as_json(), pretty=True) + "\n").encode())
    return path


def is_search(folder: Path) -> bool:
    """Whether a folder contains the result of a search."""
    return (folder / RESULT_FILE).is_file()


def read_search(folder: Path) -> SearchResult:
    """Read the result of the search in a folder."""
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
