"""The documentation site from disk in a real browser: nothing is loaded from elsewhere, the search finds pages."""

import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from paths import ROOT

# Building the site takes longest; tests/docs/test_site.py checks its links and what it loads in the gate.
pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "site.py", "--out", out], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return (Path(out) / "site" / "index.html").as_uri()


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1360, "light")])
def test_a_page_is_complete_without_a_network(width: int, scheme: str, browser: Browser, home: str) -> None:
    with browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme) as context:
        page = context.new_page()
        foreign, errors = [], []
        page.on("request", lambda request: foreign.append(request.url) if "://" in request.url[:9] else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        for name in ("index.html", "rules/index.html", "api.html"):
            page.goto(home.replace("index.html", name))
            expect(page.locator("h1")).to_be_visible()
            # Wide tables and code scroll inside the page.
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert [url for url in foreign if not url.startswith("file:")] == []
        assert errors == []


def test_the_search_finds_a_page_from_disk(browser: Browser, home: str) -> None:
    with browser.new_context(viewport={"width": 1360, "height": 900}) as context:
        page = context.new_page()
        page.goto(home)
        page.keyboard.press("Control+k")
        box = page.get_by_placeholder("Search").last
        expect(box).to_be_visible()
        box.press_sequentially("exact resume", delay=20)
        expect(box).to_have_value("exact resume")
        expect(page.get_by_text("Train, stop, resume").first).to_be_visible()
