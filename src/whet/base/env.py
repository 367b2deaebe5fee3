"""Environment variables. They locate things; they never decide how a model is trained."""

import os
from collections.abc import Container, Mapping
from pathlib import Path

HOME_VARIABLE = "WHET_HOME"


def home() -> Path:
    """Return the folder for what outlives a run (evidence, caches): $WHET_HOME, else the user's cache folder."""
    # Empty counts as unset, as for most Unix programs.
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

    `defaults` are values that a library writes itself, so that they are not the user's choice.
    """
    # Written to os.environ, not passed on: the library reads it in this process, when it is imported.
    for name, value in values.items():
        if read(name) is None or read(name) in defaults:
            os.environ[name] = value


def c_locale_environment() -> dict[str, str]:
    """Return an environment in which programs print English and a decimal point, so that their output can be parsed."""
    return child_environment(LC_ALL="C", LANG="C", LANGUAGE="C")
