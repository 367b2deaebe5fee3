"""Installing a virtual Mac changes the process, so each test starts others; the compiled part is built once."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from virtual_process import INSTALL, environment

from places import ROOT
from warm import WarmPython

Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def home(pytestconfig: pytest.Config) -> Path:
    """Where the compiled part is kept between test runs; building it takes half a minute."""
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("virtual-mac")


@pytest.fixture(scope="session")
def _built(home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INSTALL], env=environment(home), capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def python(home: Path, _built: None, tmp_path: Path, warm_python: WarmPython) -> Start:
    """Runs Python code in a process of its own, which has imported torch."""

    def run(code: str, *words: object, **changes: str) -> subprocess.CompletedProcess[str]:
        return warm_python.run("-W", "error", "-c", code, *words, cwd=tmp_path, env=environment(home, **changes))

    return run


@pytest.fixture
def run_pytest(home: Path, _built: None) -> Start:
    """Runs pytest as a project that has whet installed would."""
    # A checkout that is not installed has no entry point yet.
    is_known = list(entry_points(group="pytest11", name="virtual-mac"))
    plugin: Sequence[str] = () if is_known else ("-p", "whet.device.virtual_mac.plugin")

    def run(*words: object, cwd: Path = ROOT, **changes: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin, *map(str, words)]
        env = environment(home, **changes)
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)

    return run
