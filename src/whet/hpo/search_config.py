"""The configuration of a search, saved beside its trials."""

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
# Evaluations per trial, evenly spaced. The first two never prune (see samplers.py).
EVALUATIONS = 9


class SearchConfig(FrozenModel):
    """The configuration of a search, without its time limit and number of workers."""

    format_version: int = FORMAT_VERSION
    name: str
    recipe: str
    """The `name` of the recipe."""
    goal: str
    is_higher_better: bool = True
    resource: str = "epochs"
    """The budget of a trial: "epochs" or "steps". The evaluations of a trial are spread evenly over it."""
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
    """Raise UsageError if a search is resumed under the same name with a different configuration."""
    ours, theirs = _as_typed(given), _as_typed(saved)
    for key, value in ours.items():
        if value != theirs[key]:
            raise UsageError(
                f"{where} is another search: {key} differs",
                got=f"{value} instead of {theirs[key]}"[:300],
                try_="the same arguments, or another --name",
            )


def _as_typed(config: SearchConfig) -> dict[str, Any]:
    """Return the fields as a user would type them."""
    space = " ".join(config.space.arguments)
    fixed = " ".join(sorted(as_argument(key, value) for key, value in config.fixed.items()))
    return {**config.as_json(), "space": space, "fixed": fixed or "no other settings"}


def write_search_config(folder: Path, config: SearchConfig) -> None:
    data = (strict_json.encode(config.as_json(), pretty=True) + "\n").encode()
    durable.write_file(folder / SEARCH_FILE, data=data)


def read_search_config(folder: Path) -> SearchConfig | None:
    """Return the configuration in a folder, or None if there is none."""
    path = folder / SEARCH_FILE
    if not path.is_file():
        return None
    try:
        return SearchConfig.from_json(strict_json.decode(path.read_bytes()), where=path)
    except (OSError, ValueError) as error:
        raise UsageError("the search cannot be read", got=f"{path}: {error}"[:300], try_="another --name") from None
