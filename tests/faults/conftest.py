"""Fixtures for runs that are killed, disks that fail and files that are damaged."""

from pathlib import Path

import pytest

from fault_runs import SMALL, FaultRuns
from fork_server import ForkServer


@pytest.fixture
def fault_runs(fork_server: ForkServer, memory_folder: Path) -> FaultRuns:
    return SMALL(fork_server, memory_folder)
