"""Fixtures for runs that are killed, disks that fail and files that are damaged."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fault_runs import SMALL, FaultRuns
from fork_server import ForkServer


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where a sync costs nothing, for tests that start many processes and need no real disk."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        yield tmp_path
        return
    with TemporaryDirectory(dir=shared, prefix="whet-faults-") as folder:
        yield Path(folder)


@pytest.fixture
def fault_runs(fork_server: ForkServer, memory_folder: Path) -> FaultRuns:
    return SMALL(fork_server, memory_folder)
