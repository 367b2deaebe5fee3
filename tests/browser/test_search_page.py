"""The report of a search in a real browser: nothing needs horizontal scrolling."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from browser_visit import DESK, PHONE, Visit
from whet.report.search_report import search_page
from whet.run.search_result import SearchCandidate, SearchResult, SearchTrial

pytestmark = pytest.mark.browser

CUT = "(nodes) => nodes.filter((node) => node.scrollWidth > node.clientWidth + 1).map((node) => node.textContent)"
SETTINGS = {"lr": 0.002137, "arch.layers": 2, "dropout": 0.1313, "weight_decay": 0.0123}


def result() -> SearchResult:
    candidates = [
        SearchCandidate(
            number=n, settings=SETTINGS, values={"1": 0.80123, "2": 0.81, "3": 0.79}, mean=0.8, low=0.7, high=0.9
        )
        for n in (7, 4)
    ]
    trials = [SearchTrial(number=n, state="complete", value=n / 10, settings=SETTINGS, steps=1_650) for n in range(8)]
    return SearchResult(
        name="reviews",
        recipe="text",
        goal="accuracy",
        space=("lr=1e-5..1e-2:log", "arch.layers=[1,2]", "dropout=0..0.5", "weight_decay=0..0.1"),
        trials=tuple(trials),
        candidates=tuple(candidates),
        is_confirmed=True,
        difference_low=-0.01,
        difference_high=0.03,
    )


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_no_line_is_truncated(browser: Browser, pictures: Path, tmp_path: Path, size: tuple[int, int]) -> None:
    file = tmp_path / "report.html"
    file.write_text(search_page(result()))
    visit = Visit(browser, pictures, home=file.as_uri(), is_offline=True, size=size)
    visit.page.goto(file.as_uri())
    visit.picture(f"search-{size[0]}", whole=True)
    logged = visit.page.locator("pre").inner_text()
    assert logged.endswith("not clearly ahead of trial 4")
    assert visit.page.eval_on_selector_all("main *", CUT) == []
    assert visit.too_wide == []
    assert visit.faults == []
    visit.close()
