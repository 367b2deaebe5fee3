"""Shared fixtures and the rules that every test keeps.

A marker is what a test needs: `torch`, `gpu`, `virtual_mac` or `browser`; `slow` tests run in `make test-all` only. A
test without the marker `torch` runs where torch is not installed. A test that leaks an environment variable or changes
the working folder fails.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings

from amounts import IS_GATE, amount
from fork_server import TIMEOUT_SECONDS, ForkServer
from homes import new_home
from paths import Run
from warm_python import WarmPython

# The gate draws the same examples each time, so that it fails for a change and not by chance; `make test-all` searches.
settings.register_profile(
    "whet",
    deadline=None,
    derandomize=IS_GATE,
    max_examples=amount(30, 100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("whet")

# Users set neither: output stays buffered until it is flushed, and Python writes its cache files.
for _name in ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"):
    os.environ.pop(_name, None)

# A shell starts background jobs with SIGINT ignored, which every child process inherits. Many tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# pytest, its plugins and torch change these themselves.
_SET_BY_PYTEST = {"PYTEST_CURRENT_TEST", "PYTEST_XDIST_TESTRUNUID", "COLUMNS", "LINES"}
_SET_BY_TORCH = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH"}
_SET_BY_TORCH |= {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
_IGNORED = _SET_BY_PYTEST | _SET_BY_TORCH

_LONG_FILES = (
    "virtual_mac/test_virtual_operators.py",
    "distributed/test_multi_process_training.py",
    "data/test_loader.py",
    "prove/test_prove.py",
    "faults/test_hostile_files.py",
    "docs/test_tutorials.py",
    "verify/test_compiled_parity.py",
    "browser/test_pages.py",
    "virtual_mac/test_apple_device.py",
    "virtual_mac/test_pytest_plugin.py",
    "faults/test_search_kills.py",
    "prove/test_prove_function.py",
    "browser/test_broken_connections.py",
    "recipes/text/test_text_training.py",
    "step/test_step_rollback.py",
    "training/test_state_cases.py",
    "docs/test_docs.py",
    "docs/test_examples.py",
    "training/test_supervisor.py",
    "training/test_shipped_bench.py",
    "cli/test_measure_command.py",
    "device/test_heap.py",
)
"""Files that take longest. They start first, in this order: each runs in one worker, and a late one delays the end. One
of the virtual Mac is the first, because the others wait until its native part is built."""

_NEEDS_TORCH = re.compile(r"^pytestmark = [^=]*\bmark\.torch\b", re.MULTILINE)
_HAS_TORCH = find_spec("torch") is not None and not os.environ.get("WHET_TEST_WITHOUT_TORCH")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Skip files and folders that need torch where it is missing; WHET_TEST_WITHOUT_TORCH=1 acts as if it were."""
    if _HAS_TORCH:
        return None
    if collection_path.is_dir():
        files = list(collection_path.rglob("test_*.py"))
    else:
        files = [collection_path] if collection_path.name.startswith("test_") else []
    # A folder is skipped as a whole where all of its files are: its conftest.py may import torch, too.
    return True if files and all(_NEEDS_TORCH.search(file.read_text()) for file in files) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / file: place for place, file in enumerate(_LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `gpu("cuda")` or `gpu("mps")` where that device is missing."""
    marker = item.get_closest_marker("gpu")
    if marker is not None:
        from whet.device.open import UNAVAILABLE_REASONS

        (kind,) = marker.args
        reason = UNAVAILABLE_REASONS[kind]()
        if reason is not None:
            pytest.skip(f"no {kind}: {reason}")


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    before, folder = {k: v for k, v in os.environ.items() if k not in _IGNORED}, Path.cwd()
    yield
    after = {k: v for k, v in os.environ.items() if k not in _IGNORED}
    assert after == before, "the test leaked environment variables"
    assert Path.cwd() == folder, "the test changed the working folder"


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run torch on one thread, so that two test processes share two cores."""
    if request.node.get_closest_marker("torch") is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def whet(tmp_path: Path) -> Run:
    """Run `whet ARGUMENTS` in a new process and an empty folder."""

    def run(*arguments: str, cwd: Path = tmp_path, path: Path | None = None, **environment: str):
        env = {**os.environ, **environment, "WHET_HOME": str(new_home(tmp_path / "whet-home"))}
        if path is not None:
            env["PYTHONPATH"] = str(path)
        command = [sys.executable, "-m", "whet", *arguments]
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)

    return run


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """A process that has imported torch and forks others."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def warm_python(fork_server: ForkServer) -> WarmPython:
    """Run `python ARGUMENTS` as a fork of a process that has imported torch."""
    return WarmPython(fork_server)


@pytest.fixture
def warm_whet(warm_python: WarmPython, tmp_path: Path) -> Run:
    """Run `whet ARGUMENTS` in an empty folder, like `whet`, without the seconds that importing torch takes."""

    def run(*arguments: str, cwd: Path = tmp_path, **environment: str):
        env = {**os.environ, **environment, "WHET_HOME": str(new_home(tmp_path / "whet-home"))}
        return warm_python.run("-m", "whet", *arguments, cwd=cwd, env=env)

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests counted (kills, power cuts, mutations): a pass alone does not show how much was tried."""
    for report in terminalreporter.stats.get("passed", ()):
        for name, line in getattr(report, "user_properties", ()):
            if name == "counts" and report.when == "call":
                terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {line}")


@pytest.fixture
def report_count(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Print a line with what a test counted at the end of the test run."""
    return lambda line: record_property("counts", line)


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where a sync costs nothing, for tests that start many processes and need no real disk."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        yield tmp_path
        return
    with TemporaryDirectory(dir=shared, prefix="whet-faults-") as folder:
        yield Path(folder)
