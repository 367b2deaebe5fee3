"""The configuration of a search, saved next to its trials."""

from pathlib import Path
from typing import Any

from pydantic import Field

from whet.base.errors import UsageError
from whet.base.model import FrozenModel
from whet.config.sources import as_argument
from whet.hpo.space import SearchSpace
from whet.run import durable, strict_json

SEARCH_FILE = "search.json"
FORMAT_VERSION = 1
# Evaluations per trial, evenly spaced. By default, the first one never prunes a trial (see samplers.py).
EVALUATIONS = 9


class SearchConfig(FrozenModel):
    """The configuration that all sessions of a search share.

    The number of trials, the time limit and the number of workers are not included, because they may change.
    """

    format_version: int = FORMAT_VERSION
    name: str
    recipe: str
    """The `name` of the recipe."""
    goal: str
    is_higher_better: bool = True
    resource: str = "epochs"
    """The unit of a trial's budget: "epochs" or "steps". The evaluations are spread evenly over the budget."""
    space: SearchSpace
    fixed: dict[str, Any] = Field(default_factory=dict)
    """The settings shared by all trials, as given by the user."""
    subset: float = Field(1.0, gt=0, le=1)
    """The fraction of the training data that trials use."""
    seed: int = 0
    seeds: int = Field(3, ge=0)
    sampler: str = "TPESampler"
    pruner: str = "PercentilePruner"
    evaluations: int = Field(EVALUATIONS, ge=1)


def check_same_search(saved: SearchConfig, given: SearchConfig, *, where: str) -> None:
    """Raise UsageError if a search with the saved configuration is resumed with a different one."""
    ours, theirs = _as_typed(given), _as_typed(saved)
    for key, value in ours.items():
        if value != theirs[key]:
            raise UsageError(
                f"{where} is another search: {key} differs",
                got=f"{value} instead of {theirs[key]}"[:300],
                try_="the same arguments, or another --name",
            )


def _as_typed(config: SearchConfig) -> dict[str, Any]:
    """Return the fields of a configuration, with the space and the fixed settings as command-line arguments."""
    space = " ".join(config.space.arguments)
    fixed = " ".join(sorted(as_argument(key, value) for key, value in config.fixed.items()))
    return {**config.as_json(), "space": space, "fixed": fixed or "no other settings"}


def write_search_config(folder: Path, config: SearchConfig) -> None:
    data = (strict_json.encode(config.as_json(), pretty=True) + "\n").encode()
    durable.write_file(folder / SEARCH_FILE, data=data)


def read_search_config(folder: Path) -> SearchConfig | None:
    """Return the search configuration of a folder, or None if it has none."""
    path = folder / SEARCH_FILE
    if not path.is_file():
        return None
    try:
        return SearchConfig.from_json(strict_json.decode(path.read_bytes()), where=path)
    except (OSError, ValueError) as error:
        raise UsageError("the search cannot be read", got=f"{path}: {error}"[:300], try_="another --name") from None
