"""Environment variables. Those of whet only locate files and programs; machine/environment.py reads those of torch."""

import os
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

HOME_VARIABLE = "WHET_HOME"
_MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


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


def malloc_variable() -> str | None:
    """Return the variable with which the user has configured malloc of glibc; None if there is none."""
    if "glibc.malloc." in (read("GLIBC_TUNABLES") or ""):
        return "GLIBC_TUNABLES"
    return next((name for name in _MALLOC_VARIABLES if read(name)), None)


def child_environment(**changes: str) -> dict[str, str]:
    """Return a copy of this environment with `changes`, for a child process."""
    return {**os.environ, **changes}


@contextmanager
def safe_path() -> Iterator[None]:
    """Start Python without the current folder on its path while entered, where `python -P` cannot be passed."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def set_defaults(values: Mapping[str, str], *, defaults: Container[str] = ()) -> None:
    """Set variables that libraries read in this process, unless the user has set them.

    `defaults` are values that a library writes into the environment itself. They do not count as the user's choice.
    """
    # Write to os.environ of this process, because the library reads its variables here, at import.
    for name, value in values.items():
        if read(name) is None or read(name) in defaults:
            os.environ[name] = value


def prepend_to_path(folder: Path) -> None:
    """Let this process and its children find programs in `folder` first."""
    os.environ["PATH"] = os.pathsep.join([str(folder), os.environ.get("PATH") or os.defpath])


def c_locale_environment() -> dict[str, str]:
    """Return an environment in which programs print English and a decimal point, so that their output can be parsed."""
    return child_environment(LC_ALL="C", LANG="C", LANGUAGE="C")
