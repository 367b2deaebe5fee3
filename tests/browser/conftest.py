"""One browser for each test file. Without a browser the tests are skipped with the reason."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from browser_visit import TIMEOUT_MS, pictures_folder
from chromium import MISSING, find_chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The system's chromium."""
    path = find_chromium()
    if path is None:
        pytest.skip(MISSING)
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--disable-dev-shm-usage"])
        yield started
        started.close()


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for screenshots of the pages."""
    return pictures_folder(tmp_path_factory.getbasetemp() / "pictures")
