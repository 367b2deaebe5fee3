"""Why are the embedded conversations other than when a run was started? They are made from whet and from Python."""

from collections.abc import Mapping

from whet.base.errors import UsageError
from whet.run.folder import versions


def explained(error: UsageError, then: Mapping[str, str | None]) -> UsageError:
    """The refusal of other data with its reason; `then` are the versions that the run was started with."""
    now = versions()
    changes = [
        f"{name} has changed since ({then.get(key)} -> {now[key]})"
        for key, name in (("whet", "whet"), ("python", "Python"))
        if then.get(key) != now[key]
    ]
    why = " and ".join(changes) or f"whet has changed since (still {now['whet']}, with other files)"
    before = ", ".join(f"{name} {then.get(key)}" for key, name in (("whet", "whet"), ("python", "Python")))
    return UsageError(
        error.what,
        got=f"{error.got}; the embedded talks are made from whet itself and from Python's library, and {why}",
        try_=f"--fresh or another --run to start anew; to go on, what it was started with ({before}); "
        "talks of your own (whet data chat) stay as they are",
    )
