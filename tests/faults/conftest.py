"""Faults: processes that are killed, disks that refuse, power that fails, files that lie."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from lives import SMALL, Lives
from zygote import Zygote


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder whose syncs cost nothing, for tests that need many lives and no real disk."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        yield tmp_path
        return
    with TemporaryDirectory(dir=shared, prefix="whet-faults-") as folder:
        yield Path(folder)


@pytest.fixture
def lives(zygote: Zygote, memory_folder: Path) -> Lives:
    return SMALL(zygote, memory_folder)
