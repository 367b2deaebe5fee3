"""The live page with broken or silent connections, late or refused responses, and replaced runs."""

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, Route, StorageState, expect

from browser_server import start_server
from whet.report.watch.status_reader import run_id
from whet.run.events import EventLog
from whet.run.folder import create_run

pytestmark = [pytest.mark.torch, pytest.mark.browser]

SILENT_MS, LATER_MS = 46_000, 5_100
AT_ONCE = 60_000
HIDE = """(isHidden) => {
  Object.defineProperty(document, "visibilityState", { value: isHidden ? "hidden" : "visible", configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


@dataclass
class Served:
    """A folder of runs and its server, which can be restarted."""

    folder: Path
    server: subprocess.Popen[str]
    logged: dict[str, str]
    state: StorageState | None = None
    """The state of a browser that has opened the link."""

    def start(self, *, port: int) -> None:
        self.server, self.logged = start_server(self.folder, port=port)

    def end(self) -> None:
        self.server.terminate()
        self.server.wait(timeout=30)


@dataclass
class Place:
    """One run, and a browser that can open it."""

    served: Served
    context: BrowserContext
    held: list[Route] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.served.folder / "runs" / "one"

    def make(self, *, steps: int) -> None:
        made = create_run(self.run, recipe="text", config={}, plan={}, machine={}, versions={}, command=["whet"])
        with EventLog(made) as log:
            log.append("start", step=0, total_steps=9)
            for step in range(1, steps + 1):
                log.append("step", step=step, epoch=0, samples=step, loss=1 / step)

    def finish(self) -> None:
        with EventLog(self.run) as log:
            log.append("end", step=2, state="done")

    def page(self) -> Page:
        """Open a new page whose clock can be advanced."""
        page = self.context.new_page()
        page.clock.install()
        return page

    def open(self, page: Page, place: str = "") -> Page:
        page.goto(self.served.logged["url"] + place)
        return page

    def enter(self) -> None:
        """Open the link, once for each server."""
        page = self.context.new_page()
        page.goto(self.served.logged["link"])
        page.wait_for_url(lambda url: "token" not in url)
        page.close()
        self.served.state = self.context.storage_state()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    made = Served(folder, *start_server(folder))
    yield made
    made.end()


@pytest.fixture
def place(browser: Browser, served: Served) -> Iterator[Place]:
    made = Place(served, browser.new_context(storage_state=served.state))
    made.make(steps=2)
    if served.state is None:
        made.enter()
    yield made
    made.context.close()
    shutil.rmtree(made.run)


def status(page: Page) -> Locator:
    return page.locator(".status").first


def expect_after_requests(page: Page, locator: Locator, text: str) -> None:
    """Like `expect`, without the pauses between requests."""
    for _ in range(100):
        if locator.inner_text() == text:
            break
        with page.expect_response("**/api/runs*/**", timeout=AT_ONCE):
            page.clock.fast_forward(LATER_MS)
    expect(locator).to_have_text(text)


def test_a_server_that_is_held_still_is_not_called_live(place: Place) -> None:
    page = place.open(place.page())
    expect(status(page)).to_have_text("live")
    server = place.served.server
    server.send_signal(signal.SIGSTOP)
    try:
        # Between two requests the first one only starts the next request.
        for _ in range(2):
            page.clock.fast_forward(SILENT_MS)
        expect(status(page)).to_have_text("not connected; trying again", timeout=AT_ONCE)
        place.finish()
    finally:
        server.send_signal(signal.SIGCONT)
    page.clock.fast_forward(LATER_MS)
    expect(page.locator(".runs .pill")).to_have_text("done", timeout=AT_ONCE)
    expect(status(page)).to_have_text("live")


def test_a_request_without_a_response_is_repeated(place: Place) -> None:
    """A request through a tunnel that died during sleep stays open forever."""
    page = place.page()
    page.route("**/api/runs/*", lambda route: place.held.append(route), times=1)
    place.open(page, f"#/run/{run_id('one')}")
    while not place.held:
        page.wait_for_timeout(50)
    page.clock.fast_forward(SILENT_MS)
    expect(page.locator(".notice.bad")).to_be_visible(timeout=AT_ONCE)
    page.clock.fast_forward(LATER_MS)
    expect(page.locator(".hero .pill")).to_have_text("stopped", timeout=AT_ONCE)


@pytest.mark.parametrize("what", ["", f"#/run/{run_id('one')}"])
def test_a_failure_that_passes_is_not_the_end(place: Place, what: str) -> None:
    page = place.page()
    page.route("**/api/runs*", lambda route: route.fulfill(status=503, body="too many at once"), times=1)
    page.route("**/api/runs/*", lambda route: route.abort(), times=1)
    place.open(page, what)
    expect(page.locator(".notice.bad")).to_be_visible(timeout=AT_ONCE)
    page.clock.fast_forward(LATER_MS)
    expect(page.locator(".pill").first).to_have_text("stopped", timeout=AT_ONCE)
    expect(page.locator(".notice.bad")).to_have_count(0)
    expect(status(page)).to_have_text("live")


def test_a_list_that_was_shown_stays_when_a_later_answer_fails(place: Place) -> None:
    page = place.open(place.page())
    row = page.get_by_role("link", name="one", exact=True)
    expect(row).to_be_visible()
    page.route("**/api/runs?since=*", lambda route: route.fulfill(status=503, body="too many at once"), times=1)
    expect(status(page)).to_have_text("could not be read", timeout=AT_ONCE)
    expect(row).to_be_visible()
    page.clock.fast_forward(LATER_MS)
    expect(status(page)).to_have_text("live", timeout=AT_ONCE)
    expect(row).to_be_visible()


def test_after_a_restart_the_page_shows_a_fix_and_reconnects(place: Place) -> None:
    page = place.open(place.page())
    expect(status(page)).to_have_text("live")
    place.served.end()
    expect(status(page)).to_have_text("not connected; trying again", timeout=AT_ONCE)
    place.served.start(port=int(place.served.logged["url"].rpartition(":")[2].strip("/")))
    logged = "not connected: the server was restarted; open the link that it printed"
    page.clock.fast_forward(LATER_MS)
    expect(status(page)).to_have_text(logged, timeout=AT_ONCE)
    place.enter()
    page.clock.fast_forward(LATER_MS)
    expect(status(page)).to_have_text("live", timeout=AT_ONCE)


def test_a_hidden_page_asks_nothing_until_it_is_seen_again_simulated(place: Place) -> None:
    page = place.open(place.page())
    expect(status(page)).to_have_text("live")
    page.evaluate(HIDE, True)
    page.clock.fast_forward(LATER_MS)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    place.finish()
    page.clock.fast_forward(LATER_MS)
    page.wait_for_timeout(1_500)
    assert asked == []
    page.evaluate(HIDE, False)
    expect(page.locator(".runs .pill")).to_have_text("done", timeout=AT_ONCE)


def test_ages_are_updated_in_an_unchanged_list(place: Place) -> None:
    page = place.open(place.page())
    changed = page.locator(".runs td").last
    expect(changed).to_contain_text(" s ago")
    # Less than the interval of its requests; the clock of the server was not advanced.
    page.clock.fast_forward(40_000)
    expect(changed).to_have_text(re.compile(r"[4-9]\d s|min"), timeout=2 * AT_ONCE)


def test_a_run_that_comes_back_is_shown_and_one_trained_again_is_the_new_one(place: Place) -> None:
    page = place.open(place.page(), f"#/run/{run_id('one')}")
    steps = page.locator(".tile", has_text="steps").locator("strong")
    expect(steps).to_have_text("2")
    away = place.run.with_name(".away")
    place.run.rename(away)
    expect_after_requests(page, status(page), "the run was removed; this is its last state")
    away.rename(place.run)
    expect_after_requests(page, status(page), "live")
    shutil.rmtree(place.run)
    expect_after_requests(page, status(page), "the run was removed; this is its last state")
    place.make(steps=7)
    expect_after_requests(page, steps, "7")
    expect(status(page)).to_have_text("live")
