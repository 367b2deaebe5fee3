"""One browser for each file of tests; without one they are skipped, and say so."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from chromium import MISSING, find_chromium
from visiting import PATIENCE_MS, pictures_folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The system's chromium."""
    path = find_chromium()
    if path is None:
        pytest.skip(MISSING)
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--disable-dev-shm-usage"])
        yield started
        started.close()


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures of the pages are kept."""
    return pictures_folder(tmp_path_factory.getbasetemp() / "pictures")
