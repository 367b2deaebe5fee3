"""Build, cache and load the C++ extension, and hold the state of the virtual Mac in this process."""

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from whet.base import env
from whet.base.errors import UsageError, WhetError
from whet.base.extras import install_hint
from whet.machine.facts import Machine

NAME = "whet_virtual_mac"
SOURCES = Path(__file__).parent / "cpp"
_BUILD_TIMEOUT_SECONDS = 900


def load_extension(torch_version: str) -> ModuleType:
    """Load the extension. If it is not in the cache, build it first, which takes half a minute."""
    library = _folder(torch_version) / f"{NAME}.so"
    if not library.exists():
        with _build_lock(library.parent):
            # Another process may have built the library while this one waited for the lock.
            if not library.exists():
                _build(library)
    spec = importlib.util.spec_from_file_location(
        NAME, library, loader=importlib.machinery.ExtensionFileLoader(NAME, str(library))
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _folder(torch_version: str) -> Path:
    """Return the cache folder for this version of torch, of Python and of the C++ sources."""
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.iterdir(), Path(__file__).with_name("compile_native.py")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    tag = f"torch-{torch_version}-{sys.implementation.cache_tag}-{digest.hexdigest()[:12]}"
    return env.home() / "virtual-mac" / tag


@contextmanager
def _build_lock(folder: Path) -> Iterator[None]:
    """Hold the lock for a build in `folder`. The operating system releases it if the process dies."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(library: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), env.read("PATH") or os.defpath])
    _check_build_tools(path)
    work = library.parent / "build"
    # An interrupted build may have left this folder.
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    # -P keeps the folder of the script off sys.path.
    command = [sys.executable, "-P", str(Path(__file__).with_name("compile_native.py")), NAME, str(SOURCES), str(work)]
    try:
        done = subprocess.run(
            command,
            env=env.child_environment(PATH=path),
            capture_output=True,
            text=True,
            timeout=_BUILD_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise WhetError(
            "the virtual Mac could not be built", got=f"not finished after {_BUILD_TIMEOUT_SECONDS} s"
        ) from None
    built = work / library.name
    if done.returncode != 0 or not built.exists():
        raise WhetError(
            "the virtual Mac could not be built", got=_first_error(done.stdout + done.stderr), try_=_install_hint()
        )
    # Rename the complete file, so that other processes never load a partial library.
    built.replace(library)
    shutil.rmtree(work, ignore_errors=True)


def _check_build_tools(path: str) -> None:
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    compiler = env.read("CXX") or "c++"
    missing = [tool for tool in (compiler, "ninja") if shutil.which(tool, path=path) is None]
    if not headers.exists():
        missing.append("Python.h")
    if missing:
        raise WhetError(
            "the virtual Mac needs a C++ compiler, ninja and Python's headers",
            got=f"no {', no '.join(missing)}",
            try_=_install_hint(),
        )


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # Return the compiler's first error, or the last line of Python's traceback if there is none.
    errors = [line for line in lines if ": error: " in line or ": fatal error: " in line] or lines[-1:]
    return (errors or ["no output"])[0][:300]


@dataclass
class VirtualMacState:
    """The extension and the simulated machine of this process."""

    native: ModuleType | None = None
    """The extension, which stays loaded after `uninstall`, or None if it is not loaded."""
    kernels: frozenset[str] = frozenset()
    """Names of operators that have a kernel on the virtual GPU, without overload names."""
    machine: Machine | None = None
    """The simulated machine, or None if no virtual Mac is installed."""
    undo: list[Callable[[], None]] | None = None
    """Functions that undo the patches of torch, or None if no virtual Mac is installed."""


state = VirtualMacState()


def native() -> Any:
    """Return the loaded extension. Raise UsageError if no virtual Mac has been installed in this process."""
    if state.native is None:
        raise UsageError("no virtual Mac is installed in this process", try_='virtual_mac.install("m2-air-8gb")')
    return state.native


def _install_hint() -> str:
    return f"{install_hint('virtual-mac')} and a C++ compiler (Debian: apt install g++ python3-dev)"
