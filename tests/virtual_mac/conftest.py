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
def _built(home: Path, warm_python: WarmPython) -> None:
    done = warm_python.run("-c", INSTALL, cwd=home, env=environment(home), timeout=1800)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def python(home: Path, _built: None, tmp_path: Path, warm_python: WarmPython) -> Start:
    """Run Python code in a process of its own, forked from one that has imported torch."""

    def run(code: str, *arguments: object, **changes: str) -> subprocess.CompletedProcess[str]:
        return warm_python.run("-W", "error", "-c", code, *arguments, cwd=tmp_path, env=environment(home, **changes))

    return run


@pytest.fixture
def words_of_pytest() -> Sequence[str]:
    """How a project that depends on whet would start pytest."""
    # A checkout that is not installed has no entry point.
    is_known = list(entry_points(group="pytest11", name="virtual-mac"))
    return ("-m", "pytest", "-p", "no:cacheprovider", *(() if is_known else ("-p", "whet.device.virtual_mac.plugin")))


@pytest.fixture
def run_pytest(home: Path, _built: None, words_of_pytest: Sequence[str]) -> Start:
    """Run pytest as a project that depends on whet would."""

    def run(*arguments: object, cwd: Path = ROOT, **changes: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words_of_pytest, *map(str, arguments)]
        env = environment(home, **changes)
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)

    return run


@pytest.fixture
def run_checks(home: Path, _built: None, words_of_pytest: Sequence[str], warm_python: WarmPython) -> Start:
    """Run the checks of a file of `inside`, or of a folder, on a virtual Mac; torch has been imported already."""

    def run(*arguments: object, **changes: str) -> subprocess.CompletedProcess[str]:
        # The fork has imported whet already, and pytest would have rewritten the asserts of a plugin.
        quiet = ("-q", "-W", "ignore::pytest.PytestAssertRewriteWarning")
        words = (*words_of_pytest, *quiet, "--virtual-mac", "m2-air-8gb", *arguments)
        return warm_python.run(*words, cwd=ROOT, env=environment(home, **changes))

    return run
