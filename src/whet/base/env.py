"""Environment variables, which only locate files and programs; no variable changes how a model is trained."""

import os
from collections.abc import Container, Mapping
from pathlib import Path

HOME_VARIABLE = "WHET_HOME"


def home() -> Path:
    """Return the folder for evidence and caches that outlive a run: $WHET_HOME, or the user's cache folder."""
    # Treat an empty variable as unset, like most Unix programs.
    chosen = os.environ.get(HOME_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "whet"


def read(name: str) -> str | None:
    """Return the value of a variable, or None if it is unset or empty."""
    return os.environ.get(name) or None


def child_environment(**changes: str) -> dict[str, str]:
    """Return a copy of this environment with `changes`, for a child process."""
    return {**os.environ, **changes}


def set_defaults(values: Mapping[str, str], *, defaults: Container[str] = ()) -> None:
    """Set variables that libraries read in this process, unless the user has set them.

    `defaults` are values that a library writes into the environment itself. They do not count as the user's choice.
    """
    # Write to os.environ of this process, because the library reads its variables here, at import.
    for name, value in values.items():
        if read(name) is None or read(name) in defaults:
            os.environ[name] = value


def c_locale_environment() -> dict[str, str]:
    """Return an environment in which programs print English and a decimal point, so that their output can be parsed."""
    return child_environment(LC_ALL="C", LANG="C", LANGUAGE="C")
