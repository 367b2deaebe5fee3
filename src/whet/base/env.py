"""Environment variables. They locate things; they never decide how a model is trained."""

import os
from collections.abc import Container, Mapping
from pathlib import Path

HOME_VARIABLE = "WHET_HOME"


def home() -> Path:
    """Where whet keeps what outlives a run (evidence, caches): $WHET_HOME, else the user's cache folder."""
    chosen = os.environ.get(HOME_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "whet"


def read(name: str) -> str | None:
    """The value of one variable, or None when it is unset or empty."""
    return os.environ.get(name) or None


def child_environment(**changes: str) -> dict[str, str]:
    """This environment with `changes`, for a child process: ours stays as it is."""
    return {**os.environ, **changes}


def set_defaults(values: Mapping[str, str], *, defaults: Container[str] = ()) -> None:
    """Sets variables that libraries read in this process; what the user has set stays, unless it is empty.

    `defaults` are values that a library writes there itself, which nobody has chosen.
    """
    for name, value in values.items():
        if read(name) is None or read(name) in defaults:
            os.environ[name] = value


def c_locale_environment() -> dict[str, str]:
    """An environment in which programs answer in English with a decimal point, so that their output can be read."""
    return child_environment(LC_ALL="C", LANG="C", LANGUAGE="C")
