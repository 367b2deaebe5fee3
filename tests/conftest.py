"""Tests police themselves: a test that leaks an environment variable or changes the folder fails."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from places import Run
from warm import WarmPython
from zygote import PATIENCE_SECONDS, Zygote

# The gate draws the same examples each time, so that it fails for a change and not for luck; `make test-all` searches.
for _profile, _is_fixed in (("gate", True), ("search", False)):
    settings.register_profile(
        _profile, deadline=None, derandomize=_is_fixed, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("search" if os.environ.get("WHET_SEARCH") else "gate")

# Threads that wait for work would else spin, and take the cores from the tests beside them. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A user has neither: with them nothing is held back that has to be written in the end, and no file is left beside code.
for _name in ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"):
    os.environ.pop(_name, None)

# pytest, its plugins and torch change these themselves.
_OF_PYTEST = {"PYTEST_CURRENT_TEST", "PYTEST_XDIST_TESTRUNUID", "COLUMNS", "LINES"}
_OF_TORCH = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH"}
_OF_TORCH |= {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
_IGNORED = _OF_PYTEST | _OF_TORCH

_LONG = (
    "cpu/test_several_processes.py",
    "virtual_mac/test_operators.py",
    "faults/test_prove.py",
    "virtual_mac/test_apple_device.py",
    "cpu/test_docs.py",
    "cpu/test_supervise.py",
    "faults/test_search_kills.py",
    "faults/test_hostile.py",
    "virtual_mac/test_plugin.py",
    "browser/test_pages.py",
    "cpu/test_measure_command.py",
    "cpu/test_heap.py",
    "null/test_measure_search.py",
)
"""Files of half a minute and more. A file is one worker's: a long one that comes last keeps the others waiting."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.path.as_posix().endswith(_LONG))


@pytest.fixture(autouse=True)
def _leaves_no_trace() -> Iterator[None]:
    before, folder = {k: v for k, v in os.environ.items() if k not in _IGNORED}, Path.cwd()
    yield
    after = {k: v for k, v in os.environ.items() if k not in _IGNORED}
    assert after == before, "the test leaked environment variables"
    assert Path.cwd() == folder, "the test left another working folder"


@pytest.fixture
def whet(tmp_path: Path) -> Run:
    """Runs `whet WORDS` as a user would, in an empty folder."""

    def run(*words: str, cwd: Path = tmp_path, path: Path | None = None, **environment: str):
        env = {**os.environ, **environment, "WHET_HOME": str(tmp_path / "whet-home")}
        if path is not None:
            env["PYTHONPATH"] = str(path)
        command = [sys.executable, "-m", "whet", *words]
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=PATIENCE_SECONDS)

    return run


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """A process that has imported torch, to fork others from."""
    parent = Zygote()
    yield parent
    parent.close()


@pytest.fixture(scope="session")
def warm_python(zygote: Zygote) -> WarmPython:
    """Runs `python WORDS` as a fork of a process that has imported torch."""
    return WarmPython(zygote)


@pytest.fixture
def warm_whet(warm_python: WarmPython, tmp_path: Path) -> Run:
    """Runs `whet WORDS` in an empty folder; as `whet`, but without the seconds that importing torch takes."""

    def run(*words: str, cwd: Path = tmp_path, **environment: str):
        env = {**os.environ, **environment, "WHET_HOME": str(tmp_path / "whet-home")}
        return warm_python.run("-m", "whet", *words, cwd=cwd, env=env)

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What a test counted (kills, cuts, mutations) is shown: a pass alone does not say how much was tried."""
    for report in terminalreporter.stats.get("passed", ()):
        for name, line in getattr(report, "user_properties", ()):
            if name == "counts" and report.when == "call":
                terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {line}")


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Shows a line at the end of the test run: what a test counted."""
    return lambda line: record_property("counts", line)
