"""Read and set environment variables.

The variables of whet only locate files and programs. machine/environment.py reads those that configure torch.
"""

import os
import sys
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

HOME_VARIABLE = "WHET_HOME"
_MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
BRIEF_SPIN = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
"""How long a waiting OpenMP thread spins before it sleeps: iterations for libgomp (GNU), ms for libomp (LLVM).

The defaults are 300,000 iterations and 200 ms. On busy cores, spinning threads take CPU time from the thread that they
wait for (docs/choices/0022-threads-that-sleep.md).
"""
_WAIT_POLICY = "OMP_WAIT_POLICY"
_spins_long = False


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


def with_prefix(*prefixes: str) -> dict[str, str]:
    """Return all variables whose names begin with one of the prefixes, and which are not empty."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes) and value}


def malloc_variable() -> str | None:
    """Return the name of the variable with which the user configures glibc's malloc, or None if none is set."""
    if "glibc.malloc." in (read("GLIBC_TUNABLES") or ""):
        return "GLIBC_TUNABLES"
    return next((name for name in _MALLOC_VARIABLES if read(name)), None)


def set_brief_spin() -> None:
    """Make OpenMP threads spin only briefly while they wait, unless the user has configured this.

    The variables apply to this process and its children. OpenMP libraries read them once, when torch is loaded.
    """
    global _spins_long
    if wait_variable() is not None:
        return
    _spins_long = "torch" in sys.modules and not any(map(read, BRIEF_SPIN))
    set_defaults(BRIEF_SPIN)


def wait_variable() -> str | None:
    """Return the user's setting for waiting OpenMP threads, such as "GOMP_SPINCOUNT=0", or None if there is none."""
    chosen = {name: value for name in (_WAIT_POLICY, *BRIEF_SPIN) if (value := read(name)) is not None}
    return next((f"{name}={value}" for name, value in chosen.items() if value != BRIEF_SPIN.get(name)), None)


def spins_long() -> bool:
    """Return whether torch was loaded in this process before whet could limit how long its threads spin."""
    return _spins_long


def brief_spin_export() -> str:
    """Return the shell command that makes threads spin briefly.

    >>> brief_spin_export()
    'export GOMP_SPINCOUNT=10000 KMP_BLOCKTIME=1'
    """
    return "export " + " ".join(f"{name}={value}" for name, value in BRIEF_SPIN.items())


def child_environment(**changes: str) -> dict[str, str]:
    """Return a copy of this process's environment with `changes`, for a child process."""
    return {**os.environ, **changes}


@contextmanager
def safe_path() -> Iterator[None]:
    """Set PYTHONSAFEPATH inside the `with` block, to keep the current folder off `sys.path` of child interpreters.

    Use this for child processes that cannot be started with `python -P`.
    """
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
    # Set os.environ of this process, because the library reads it when it is imported here.
    for name, value in values.items():
        if read(name) is None or read(name) in defaults:
            os.environ[name] = value


def prepend_to_path(folder: Path) -> None:
    """Prepend `folder` to PATH, so that this process and its children find programs there first."""
    os.environ["PATH"] = os.pathsep.join([str(folder), os.environ.get("PATH") or os.defpath])


def c_locale_environment() -> dict[str, str]:
    """Return environment variables with the C locale, so that the output of programs can be parsed."""
    return child_environment(LC_ALL="C", LANG="C", LANGUAGE="C")
