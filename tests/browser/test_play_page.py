"""A game of Hex on the page, in a real browser: mouse, keyboard and touch, both colors, light and dark."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, StorageState, expect

from browser_server import start
from browser_visit import DESK, PHONE, Visit

pytestmark = [pytest.mark.torch, pytest.mark.browser]

AGAIN_MS = 3_100


@dataclass
class Club:
    """A server with a player, and visits to it."""

    browser: Browser
    pictures: Path
    logged: dict[str, str]
    state: StorageState | None = None
    visits: list[Visit] = field(default_factory=list)

    def visit(self, *, size: tuple[int, int] = DESK, scheme: str = "light", game: str = "") -> Visit:
        """Open the page: the first time by the one-time link, then with its cookie."""
        home = self.logged["url"]
        visit = Visit(self.browser, self.pictures, home=home, size=size, scheme=scheme, state=self.state)
        self.visits.append(visit)
        if self.state is None:
            visit.page.goto(self.logged["link"])
            visit.page.wait_for_url(lambda url: "token" not in url)
            self.state = visit.state
        else:
            visit.page.goto(home + game)
        expect(visit.page.locator(".standing")).to_contain_text("to move")
        return visit


@pytest.fixture(scope="module")
def club(browser: Browser, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Club]:
    folder = tmp_path_factory.mktemp("club")
    words = ("play", "two-distance", "--size", "5", "--no-browser", "--json", "--port", "0")
    with (folder / "server.log").open("w") as log:
        server = start(*words, folder=folder, stdout=subprocess.PIPE, stderr=log)
    assert server.stdout is not None
    with server.stdout:
        logged = json.loads(server.stdout.readline())
    yield Club(browser, pictures, logged)
    server.terminate()
    server.wait(timeout=600)


@pytest.fixture(autouse=True)
def _nothing_goes_wrong(club: Club) -> Iterator[None]:
    """No visit leaves an error on the console or contacts another server."""
    club.visits.clear()
    yield
    for visit in club.visits:
        faults = visit.faults
        visit.close()
        assert faults == []


def stones(page: Page, colour: str) -> int:
    return page.locator(f".stone.{colour}").count()


def begin(page: Page, *, size: int, colour: str) -> None:
    page.get_by_label("size").select_option(str(size))
    page.get_by_label("you play").select_option(colour)
    page.get_by_role("button", name="new game").click()


def test_moves_are_answered_suggested_and_taken_back(club: Club) -> None:
    page = club.visit().page
    expect(page.locator(".board .cell.free")).to_have_count(25)
    page.get_by_role("button", name="a1", exact=True).click()
    expect(page.locator(".standing")).to_have_text("blue to move")
    assert (stones(page, "blue"), stones(page, "red")) == (1, 1)
    expect(page.locator(".board .cell.free")).to_have_count(23)
    meter = page.get_by_role("meter")
    blue = int(meter.get_attribute("aria-valuenow") or "")
    assert 0 < blue < 100
    bar, whole = (page.locator(part).bounding_box() for part in (".win .part", ".win"))
    assert bar is not None
    assert whole is not None
    assert abs(bar["width"] / whole["width"] - blue / 100) < 0.02
    expect(page.get_by_label("suggestions").locator("li")).to_have_count(0)
    page.get_by_role("button", name="suggestions").click()
    hints = page.locator(".suggestions li")
    expect(hints).to_have_count(5)
    expect(page.locator(".board .good-move")).to_have_count(5)
    best = hints.first.locator("b").inner_text()
    page.get_by_role("button", name=best, exact=True).press("Enter")
    expect(page.locator(".stone.blue")).to_have_count(2)
    expect(page.locator(".standing")).to_have_text("blue to move")
    club.visits[0].picture("play")
    page.get_by_role("button", name="undo").click()
    expect(page.locator(".stone.blue")).to_have_count(1)
    # The game is in the address: it survives a reload.
    before = page.locator(".moves").inner_text()
    page.reload()
    expect(page.locator(".moves")).to_have_text(before)
    page.get_by_role("button", name="undo").click()
    expect(page.locator(".moves")).to_have_text("no moves yet")
    expect(page.get_by_role("button", name="undo")).to_be_disabled()


def test_a_game_is_played_to_its_end_and_resigned(club: Club) -> None:
    page = club.visit().page
    begin(page, size=3, colour="both")
    expect(page.locator(".board .cell.free")).to_have_count(9)
    for name in ("b1", "a1", "b2", "c1", "b3"):
        page.get_by_role("button", name=name, exact=True).click()
        expect(page.locator(f'[data-cell="{name}"] .stone')).to_have_count(1)
    expect(page.locator(".standing")).to_have_text("blue wins")
    expect(page.locator(".board .won")).to_have_count(3)
    expect(page.locator(".board .cell.free")).to_have_count(0)
    expect(page.get_by_role("meter")).to_have_attribute("aria-valuenow", "100")
    club.visits[0].picture("play-won")
    page.get_by_role("button", name="undo").click()
    expect(page.locator(".standing")).to_have_text("blue to move")
    page.get_by_role("button", name="resign").click()
    expect(page.locator(".standing")).to_have_text("red wins (resigned)")
    expect(page.locator(".board .cell.free")).to_have_count(0)


def test_red_is_answered_first_and_may_swap(club: Club) -> None:
    page = club.visit().page
    begin(page, size=5, colour="red")
    expect(page.locator(".standing")).to_have_text("red to move, or swap")
    assert (stones(page, "blue"), stones(page, "red")) == (1, 0)
    page.get_by_role("button", name="swap").click()
    expect(page.locator(".standing")).to_have_text("red to move")
    assert (stones(page, "blue"), stones(page, "red")) == (1, 1)
    assert " swap " in page.locator(".moves").inner_text()
    expect(page.get_by_role("button", name="swap")).to_be_disabled()
    begin(page, size=4, colour="red")
    expect(page.get_by_role("button", name="swap")).to_be_enabled()
    page.get_by_role("button", name="resign").click()
    expect(page.locator(".standing")).to_have_text("blue wins: two-distance (resigned)")
    expect(page.get_by_role("button", name="swap")).to_be_disabled()
    page = club.visit(game="#5-red,c3").page
    page.get_by_role("button", name="suggestions").click()
    expect(page.locator(".suggestions li").first).to_have_text("swap")
    expect(page.locator(".suggestions li")).to_have_count(6)


@pytest.mark.parametrize("scheme", [pytest.param("light", marks=pytest.mark.slow), "dark"])
def test_a_phone_shows_everything(club: Club, scheme: str) -> None:
    visit = club.visit(size=PHONE, scheme=scheme, game="#13-blue,a2.g7.h6.f9.e5.d10")
    page = visit.page
    page.get_by_role("button", name="suggestions").tap()
    expect(page.locator(".suggestions li")).to_have_count(5)
    for place in range(5):
        expect(page.locator(".board .good-move").nth(place)).to_be_visible()
    assert visit.too_wide == []
    assert visit.unreadable == {}
    page.get_by_role("button", name="j4", exact=True).tap()
    expect(page.locator('[data-cell="j4"] .stone.blue')).to_have_count(1)
    expect(page.locator(".standing")).to_have_text("blue to move")
    visit.picture(f"play-phone-{scheme}")


def test_a_wrong_address_is_reported_and_a_new_game_starts(club: Club) -> None:
    visit = club.visit()
    page = visit.page
    page.goto("about:blank")
    page.goto(club.logged["url"] + "#5-both,a1.a1")
    expect(page.locator(".notice")).to_contain_text("the cell is occupied")
    visit.faults[:] = [fault for fault in visit.faults if "400" not in fault and "about:blank" not in fault]
    begin(page, size=5, colour="both")
    expect(page.locator(".board .cell.free")).to_have_count(25)
    expect(page.locator(".notice")).to_be_hidden()


def test_a_failed_request_is_repeated(club: Club) -> None:
    """Regression: the page showed forever that the player was thinking."""
    visit = club.visit()
    page, asked = visit.page, []

    def fail_twice(route: Route) -> None:
        asked.append(route.request.url)
        route.abort() if len(asked) in (1, 4) else route.continue_()

    page.route("**/api/about", lambda route: route.abort(), times=1)
    page.route("**/api/game*", fail_twice)
    page.clock.install()
    page.goto("about:blank")
    page.goto(club.logged["url"])
    expect(page.get_by_text("Failed to fetch")).to_be_visible()
    page.clock.fast_forward(AGAIN_MS)
    while not asked:
        page.wait_for_timeout(50)
    expect(page.get_by_text("Failed to fetch")).to_be_visible()
    page.clock.fast_forward(AGAIN_MS)
    expect(page.locator(".standing")).to_contain_text("blue to move")
    page.locator('[data-cell="a1"]').click()
    expect(page.get_by_text("Failed to fetch")).to_be_visible()
    page.clock.fast_forward(AGAIN_MS)
    expect(page.locator(".standing")).to_contain_text("blue to move")
    assert stones(page, "blue") + stones(page, "red") == 2
    visit.faults.clear()  # Errors that the browser logged for failed requests.
