"""Fixtures that start processes with a virtual Mac, because installing one changes the process permanently.

The native part is compiled once and cached between test runs.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from paths import ROOT
from virtual_process import INSTALL, environment
from warm_python import WarmPython

Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def home(pytestconfig: pytest.Config) -> Path:
    """The folder that keeps the compiled part between test runs: compiling takes half a minute."""
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
    """Run Python code in a process of its own, forked from one that has imported torch."""

    def run(code: str, *arguments: object, **changes: str) -> subprocess.CompletedProcess[str]:
        return warm_python.run("-W", "error", "-c", code, *arguments, cwd=tmp_path, env=environment(home, **changes))

    return run


@pytest.fixture
def run_pytest(home: Path, _built: None) -> Start:
    """Run pytest as a project that depends on whet would."""
    # A checkout that is not installed has no entry point.
    is_known = list(entry_points(group="pytest11", name="virtual-mac"))
    plugin: Sequence[str] = () if is_known else ("-p", "whet.device.virtual_mac.plugin")

    def run(*arguments: object, cwd: Path = ROOT, **changes: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin, *map(str, arguments)]
        env = environment(home, **changes)
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)

    return run
