"""Why is embedded data other than when a run was started? It is made from what is installed."""

from collections.abc import Mapping
from typing import NamedTuple

from whet.base.errors import UsageError
from whet.run.folder import versions


class Embedded(NamedTuple):
    """What data is made from, in words of its recipe."""

    is_made: str
    """ "the embedded talks are made from whet itself and from Python's library" """
    sources: Mapping[str, str]
    """What a run records the versions of, by how it is called there."""
    otherwise: str
    """What must have changed where all of those versions are the same."""
    instead: str
    """What does not change by itself."""


def explained(error: UsageError, made: Embedded, then: Mapping[str, str | None]) -> UsageError:
    """The refusal of other data with its reason; `then` are the versions that the run was started with."""
    now = versions()
    changes = [
        f"{name} has changed since ({then.get(key)} -> {now[key]})"
        for key, name in made.sources.items()
        if then.get(key) != now[key]
    ]
    before = ", ".join(f"{name} {then.get(key)}" for key, name in made.sources.items())
    return UsageError(
        error.what,
        got=f"{error.got}; {made.is_made}, and {' and '.join(changes) or made.otherwise}",
        try_=f"--fresh or another --run to start anew; to go on, what it was started with ({before}); "
        f"{made.instead} stay as they are",
    )
