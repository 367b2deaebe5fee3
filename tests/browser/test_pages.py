"""The live page and the HTML report in a real browser, with a real server and a real training."""

import io
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, StorageState, expect
from rich.console import Console
from rich.terminal_theme import MONOKAI

from browser_server import (
    EVIL,
    EVIL_NAME,
    Training,
    make_evil,
    make_sibling,
    make_torn,
    start,
    start_server,
)
from browser_visit import DESK, PHONE, Visit
from tiny_bert import write_rows
from whet.report.watch.status_reader import run_id
from whet.report.watch.terminal import BoardReader, TerminalArea, board_rows, render_board
from whet.run.folder import EVENTS_FILE

pytestmark = [pytest.mark.torch, pytest.mark.browser]

IS_FOR_SHOW = "WHET_FOR_SHOW" in os.environ
"""With this variable: full trainings after a real measurement, for screenshots in the docs. Else a short one."""
SMALL = ("arch.hidden_size=32", "arch.layers=1", "max_steps=120", "eval_every=40")
SMALL += ("data=rows.jsonl", "epochs=20")
"""A few made texts: reading the embedded ones takes seconds."""
WORDS = ("checkpoint_steps=300", "threads=1") if IS_FOR_SHOW else (*SMALL, "threads=1")
KILLED_AT, SHOWN_AT, NUM_STEPS = 700, 850, "1,650" if IS_FOR_SHOW else "120"
"""For screenshots the training is killed once and resumes from step 600, before the page is shown."""
OTHER_RATE = "lr=0.0005"
TERMINAL_COLUMNS = 120


ENDS_WITH_THE_WORK = """() => {
  const tile = [...document.querySelectorAll(".tile")].find((one) => one.textContent.includes("training time"));
  const end = document.querySelector(".timeline-ends span:last-child");
  return tile.querySelector("strong").textContent === end.textContent;
}"""
BROKEN_WORDS = """(table) => [...table.querySelectorAll("code, b")]
  .filter((node) => !/\\s/.test(node.textContent) && node.getClientRects().length > 1)
  .map((node) => node.textContent)"""
REACH = """(canvas) => {
  const { width, height } = canvas;
  const ink = getComputedStyle(document.documentElement).getPropertyValue("--series-1").trim();
  const wanted = [1, 3, 5].map((at) => parseInt(ink.slice(at, at + 2), 16));
  const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
  for (let x = width - 1; x >= 0; x--)
    for (let y = 0; y < height; y++)
      if (wanted.every((value, part) => Math.abs(data[4 * (y * width + x) + part] - value) < 12)) return x / width;
  return 0;
}"""
"""Return the right end of a curve as a share of its canvas. A curve that lags behind its axis ends early."""


HAS_MOVED = """(held) => {
  const tile = [...document.querySelectorAll(".tile")].find((one) => one.textContent.startsWith("steps"));
  return Number(tile.querySelector("strong").textContent.replaceAll(",", "")) > 1.3 * held;
}"""


FIT_BRAILLE = """() => {
  const walker = document.createTreeWalker(document.querySelector("pre"), NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  for (const text of texts.filter((one) => /[\\u2800-\\u28ff]/.test(one.data)))
    text.replaceWith(...[...text.data].map((sign) => {
      if (!/[\\u2800-\\u28ff]/.test(sign)) return sign;
      const cell = Object.assign(document.createElement("span"), { textContent: sign });
      cell.style.cssText = "display:inline-block;width:1ch;transform:scaleX(0.82);transform-origin:left";
      return cell;
    }));
}"""
"""No monospaced font of the system may have braille. That of another font is wider than a cell."""


@dataclass
class Stage:
    """A folder of runs, its server, and visits to its page."""

    folder: Path
    browser: Browser
    pictures: Path
    server: subprocess.Popen[str]
    logged: dict[str, str]
    training: Training | None = None
    state: StorageState | None = None
    visits: list[Visit] = field(default_factory=list)

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def visit(self, place: str = "", *, size: tuple[int, int] = DESK, scheme: str = "light") -> Visit:
        """Open the page: the first time by the one-time link, then with its cookie."""
        home = self.logged["url"]
        visit = Visit(self.browser, self.pictures, home=home, size=size, scheme=scheme, state=self.state)
        self.visits.append(visit)
        visit.page.goto(self.logged["link"] if self.state is None else home)
        if self.state is None:
            visit.page.wait_for_url(lambda url: "token" not in url)
            self.state = visit.state
        if place:
            visit.page.get_by_role("link", name=place, exact=True).click()
        return visit

    def train(self) -> Training:
        """The only training of these tests."""
        self.training = self.training or Training(self.folder, *WORDS, run="text-001")
        return self.training


@pytest.fixture(scope="module")
def stage(browser: Browser, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("stage")
    (folder / "runs").mkdir()
    write_rows(folder / "rows.jsonl", num_rows=300)
    server, logged = start_server(folder)
    made = Stage(folder=folder, browser=browser, pictures=pictures, server=server, logged=logged)
    if IS_FOR_SHOW:
        start("plan", "text", *WORDS, "--measure", "--budget", "45", folder=folder).wait()
    yield made
    if made.training is not None:
        made.training.end()
    server.terminate()
    server.wait(timeout=600)


@pytest.fixture(autouse=True)
def _nothing_goes_wrong(stage: Stage) -> Iterator[None]:
    """No visit leaves an error on the console, contacts another server, or executes text of a run."""
    stage.visits.clear()
    yield
    for visit in stage.visits:
        faults = visit.faults
        is_owned = visit.page.evaluate("() => 'owned' in window")
        visit.close()
        assert faults == []
        assert not is_owned


@pytest.fixture(scope="module")
def sibling(stage: Stage) -> Path:
    run = stage.train().wait()
    return Training(stage.folder, *WORDS, OTHER_RATE, run="text-002").wait() if IS_FOR_SHOW else make_sibling(run)


def test_a_training_appears_and_its_curve_moves(stage: Stage) -> None:
    visit = stage.visit()
    page = visit.page
    expect(page.get_by_text("No runs yet")).to_be_visible()
    training = stage.train()
    training.hold()
    link = page.get_by_role("link", name="text-001")
    expect(link).to_be_visible()
    link.click()
    plot = page.locator("#chart-loss canvas")
    expect(plot).to_be_visible()
    expect(page.locator(".hero .pill")).to_have_text("running")
    steps = page.locator(".tile", has_text="steps").locator("strong")
    held_at = int(steps.inner_text())
    # The timeline ends with the training, not with the last logged event.
    page.wait_for_function(ENDS_WITH_THE_WORK, polling=200)
    page.locator("#plan summary").click()
    tables = page.locator(".plan-settings")
    expect(tables).to_have_count(2)
    assert [table.evaluate(BROKEN_WORDS) for table in tables.all()] == [[], []]
    training.go_on()
    if IS_FOR_SHOW:
        training.kill_once(at=KILLED_AT)
    page.wait_for_function(HAS_MOVED, arg=SHOWN_AT / 1.3 if IS_FOR_SHOW else held_at, polling=200, timeout=600_000)
    assert plot.evaluate(REACH) > 0.9
    page.evaluate("() => scrollTo(0, 0)")
    visit.picture("live")
    page.emulate_media(color_scheme="dark")
    visit.picture("live-dark")
    page.emulate_media(color_scheme="light")
    draw_terminal(stage)
    # The run ends, and the page shows it without a reload.
    training.wait()
    expect(page.locator(".hero .pill")).to_have_text("done")
    expect(page.locator(".tile", has_text="steps").locator("strong")).to_have_text(NUM_STEPS)
    expect(page.locator(".tile", has_text="test accuracy")).to_be_visible()
    expect(page.locator("#chart-loss .caption")).to_have_text("On training and on validation samples. Lower is better.")
    # The goal metric is next to the loss, although its first value came after other curves.
    expect(page.locator(".chart h3").nth(1)).to_have_text("accuracy, macro f1, micro f1")


def draw_terminal(stage: Stage) -> None:
    """Take a screenshot of `whet watch --terminal` for the same runs."""
    console = Console(
        record=True, file=io.StringIO(), width=TERMINAL_COLUMNS, color_system="truecolor", force_terminal=True
    )
    board = BoardReader(stage.runs).read(rows=board_rows(34)).model_copy(update={"folder": Path("runs")})
    console.print(*render_board(board, TerminalArea(width=TERMINAL_COLUMNS, height=34)), sep="\n")
    visit = Visit(stage.browser, stage.pictures, home="data:", size=(1220, 700), scheme="dark")
    visit.page.set_content(console.export_html(inline_styles=True, theme=MONOKAI))
    visit.page.evaluate(FIT_BRAILLE)
    visit.picture("terminal", of="pre")
    visit.close()


def test_the_evidence_of_a_plan_is_drawn(stage: Stage, sibling: Path) -> None:
    visit = stage.visit(sibling.name)
    page = visit.page
    page.get_by_role("link", name="What was measured").click()
    evidence = page.locator("#evidence")
    page.wait_for_function("() => document.querySelector('#evidence').getBoundingClientRect().top < 20")
    candidates = evidence.locator(".candidate:not(.ruler)")
    assert candidates.count() >= 2
    for place in range(candidates.count()):
        words = candidates.nth(place).inner_text()
        assert "against" in words
    assert evidence.locator(".interval").first.bounding_box()["width"] > 1  # type: ignore[index]
    visit.picture("evidence")
    expect(page.locator("#plan .pill", has_text="measured").first).to_be_visible()


def test_two_runs_are_compared(stage: Stage, sibling: Path) -> None:
    visit = stage.visit()
    page = visit.page
    for name in ("text-001", sibling.name):
        page.get_by_label(f"compare {name}").check()
    page.get_by_role("searchbox").fill("text-00")
    visit.picture("runs")
    page.get_by_role("link", name="compare 2 runs").click()
    expect(page.get_by_role("heading", name="2 runs side by side")).to_be_visible()
    rate = page.locator("#differences tr", has=page.locator("code", has_text="lr"))
    expect(rate).to_contain_text("0.0005")
    for axis in ("samples", "time", "step"):
        page.get_by_role("button", name=axis).first.click()
        expect(page.locator(".chart canvas").first).to_be_visible()
    visit.picture("compare")
    page.reload()
    expect(page.get_by_role("heading", name="2 runs side by side")).to_be_visible()


def test_a_torn_last_line_waits_for_its_rest(stage: Stage) -> None:
    torn = make_torn(stage.runs)
    visit = stage.visit("torn")
    page = visit.page
    steps = page.locator(".tile", has_text="steps").locator("strong")
    expect(steps).to_have_text("30")
    expect(page.locator(".pill", has_text="stopped")).to_be_visible()
    expect(page.get_by_text("damaged")).to_have_count(0)
    with (torn / EVENTS_FILE).open("ab") as file:
        file.write(b'ss":0.5}\n')
    expect(steps).to_have_text("31")
    shutil.rmtree(torn)
    expect(page.get_by_role("status").first).to_contain_text("the run was removed")
    # The browser itself logs that the run is not found any more.
    visit.faults = [fault for fault in visit.faults if "404" not in fault]


def test_the_link_to_one_run_opens_its_page(stage: Stage) -> None:
    run = make_torn(stage.folder / "one")
    server, logged = start_server(stage.folder, watched="one/torn")
    visit = Visit(stage.browser, stage.pictures, home=logged["url"])
    page = visit.page
    try:
        # The first time the link sets a cookie and redirects; then it is opened again with the cookie.
        for _ in range(2):
            page.goto(logged["link"])
            expect(page.locator(".hero h1")).to_have_text("torn")
            assert page.url.endswith(f"#/run/{run_id(run.name)}")
        page.get_by_role("link", name="all runs").click()
        expect(page.get_by_role("link", name="torn", exact=True)).to_be_visible()
        assert visit.faults == []
    finally:
        visit.close()
        server.terminate()
        server.wait(timeout=600)


def test_an_update_between_press_and_release_loses_no_click(stage: Stage, sibling: Path) -> None:
    visit = stage.visit()
    page = visit.page
    page.get_by_role("button", name="run", exact=True).click()
    link = page.get_by_role("link", name="text-001")
    link.hover()
    page.mouse.down()
    row = page.locator("tr", has=link)
    steps = row.locator("td[data-label=steps]")
    before = steps.inner_text()
    log = sibling.with_name("text-001") / EVENTS_FILE
    kept = log.read_bytes()
    with log.open("ab") as file:
        file.write(b'{"kind":"step","time":1794731600.5,"step":179,"epoch":1,"samples":5000,"loss":0.5}\n')
    expect(steps).not_to_have_text(before)
    page.mouse.up()
    expect(page.locator(".hero h1")).to_have_text("text-001")
    log.write_bytes(kept)


MANY_RUNS = """async () => {
  const { RunList } = await import("/static/run_list.js");
  const list = new RunList("runs");
  document.body.append(list.element);
  const line = (number, updated, more = {}) => ({
    id: `id${number}`, name: `run-${String(number).padStart(3, "0")}`, state: "running", step: number, total_steps: 400,
    loss: number, goal: "f1", goal_value: null, updated, recipe: "text", problem: null, ...more });
  const names = () => [...list.body.querySelectorAll("th a")].map((link) => link.textContent);
  const moved = [];
  new MutationObserver((all) => all.forEach(({ addedNodes }) => addedNodes.forEach((row) => {
    if (row.tagName === "TR") moved.push(row.querySelector("th a").textContent);
  }))).observe(list.body, { childList: true });
  const news = async ({ all, changed = [], removed = [] }) => {
    await null;
    moved.length = 0;
    list.update({ runs: all ?? changed, removed, groups: [], now: 0 });
    await null;
    return { first: names().slice(0, 3), last: names().at(-1), num: names().length, moved: [...new Set(moved)] };
  };
  const found = {};
  const all = Array.from({ length: 300 }, (_, number) => line(number, 1000 - number));
  found.all = await news({ all });
  for (const number of [1, 2, 3]) list.rows.get(`id${number}`).mark.click();
  list.rows.get("id150").mark.focus();
  found.up = await news({ changed: [line(150, 2000)] });
  found.focus = document.activeElement.getAttribute("aria-label");
  list.sortBy("updated");
  list.filter.value = "run-00";
  list.draw();
  found.down = await news({ changed: [line(9, 3000)] });
  found.gone = await news({ removed: ["id2"] });
  found.compare = list.compare.getAttribute("href");
  found.anew = await news({ all, removed: ["id3"] });
  found.compared = [...list.chosen];
  list.element.remove();
  return found;
}"""


def test_an_update_moves_only_the_rows_whose_position_changed(stage: Stage) -> None:
    result = stage.visit().page.evaluate(MANY_RUNS)
    assert result["all"]["num"] == 200
    assert result["up"]["first"] == ["run-150", "run-000", "run-001"]
    assert result["up"]["moved"] == ["run-150"]
    assert result["focus"] == "compare run-150"
    # Sorted by the oldest change: the updated run moves from the top to the end.
    assert result["down"]["first"] == ["run-008", "run-007", "run-006"]
    assert (result["down"]["last"], result["down"]["moved"]) == ("run-009", ["run-009"])
    assert (result["gone"]["num"], result["gone"]["moved"]) == (9, [])
    assert result["compare"] == "#/compare/id1,id3"
    # A run that was removed while the page was disconnected is not compared.
    assert result["compared"] == ["id1"]


RUNS_BY_GOAL = """async () => {
  const { RunList } = await import("/static/run_list.js");
  const list = new RunList("runs");
  const line = (name, goal_mode, goal_value) => ({
    id: name, name, state: "done", step: 1, total_steps: 1, loss: 1, goal: "goal", goal_value, goal_mode, updated: 0 });
  const sorted = (mode) => {
    list.update({
      runs: [line("good", mode, mode === "min" ? 0.1 : 0.9), line("bad", mode, 0.5), line("none", mode, null)],
      removed: [], groups: [], now: 0 });
    return [...list.body.querySelectorAll("th a")].map((link) => link.textContent);
  };
  list.sortBy("goal");
  return { min: sorted("min"), max: sorted("max") };
}"""


def test_runs_are_sorted_by_what_is_better_for_the_goal(stage: Stage) -> None:
    best_first = ["good", "bad", "none"]
    assert stage.visit().page.evaluate(RUNS_BY_GOAL) == {"min": best_first, "max": best_first}


PLAN_SOURCES = """async () => {
  const { planPart } = await import("/static/plan.js");
  const settings = ["measured", "environment", "you", "rule"].map((source) => ({
    name: source, value: 1, reason: "", source, evidence: {} }));
  const part = planPart({ settings, warnings: [] });
  return [...part.querySelectorAll(".pill")].map((pill) => [pill.textContent, pill.className]);
}"""


def test_settings_of_the_environment_come_after_those_of_the_user(stage: Stage) -> None:
    assert stage.visit().page.evaluate(PLAN_SOURCES) == [
        ["you", "pill live"],
        ["environment", "pill live"],
        ["measured", "pill good"],
    ]


def test_text_from_a_run_is_escaped(stage: Stage) -> None:
    make_evil(stage.runs)
    visit = stage.visit()
    page = visit.page
    link = page.get_by_role("link", name="evil")
    assert link.inner_text() == f"evil {EVIL} \ufffd\ufffd[2J"
    link.click()
    page.locator(".chart canvas").first.wait_for()
    visit.open_all()
    assert page.locator("#page img").count() == 0
    assert page.get_by_text(EVIL).count() > 5
    visit.picture("evil", whole=True)


def test_a_search_below_the_runs_is_mentioned_as_it_comes(stage: Stage) -> None:
    visit = stage.visit()
    expect(visit.page.locator(".group")).to_have_count(0)
    make_evil(stage.runs / "my search")
    logged = "runs/my search contains 1 more: whet watch 'runs/my search'"
    expect(visit.page.locator(".group")).to_have_text(logged)
    visit.picture("runs-and-a-search")
    shutil.rmtree(stage.runs / "my search")
    expect(visit.page.locator(".group")).to_have_count(0)


@pytest.mark.parametrize(
    ("scheme", "size"),
    [
        pytest.param("light", PHONE, id="phone light"),
        pytest.param("dark", DESK, id="desk dark", marks=pytest.mark.slow),
    ],
)
def test_it_is_readable_on_a_phone_and_at_night(
    stage: Stage, sibling: Path, scheme: str, size: tuple[int, int]
) -> None:
    kind = "phone" if size == PHONE else "night"
    visit = stage.visit(size=size, scheme=scheme)
    page = visit.page
    page.get_by_label(f"compare {sibling.name}").check()
    page.get_by_label("compare text-001").check()
    seen = {"runs": (visit.too_wide, visit.unreadable)}
    visit.picture(f"{kind}-runs")
    page.get_by_role("link", name="compare 2 runs").click()
    page.locator(".chart canvas").first.wait_for()
    visit.open_all()
    seen["compare"] = (visit.too_wide, visit.unreadable)
    page.get_by_role("link", name="whet").click()
    page.get_by_role("link", name=sibling.name, exact=True).click()
    page.locator(".chart canvas").first.wait_for()
    visit.picture(f"{kind}-run")
    visit.picture(f"{kind}-run-whole", whole=True)
    visit.open_all()
    seen["run"] = (visit.too_wide, visit.unreadable)
    assert seen == {"runs": ([], {}), "compare": ([], {}), "run": ([], {})}


@pytest.mark.parametrize(
    "name",
    [pytest.param("text-002", id="real", marks=pytest.mark.slow), pytest.param(EVIL_NAME, id="evil")],
)
def test_a_report_opens_from_a_file_without_a_network(stage: Stage, sibling: Path, name: str) -> None:
    if not (stage.runs / name).exists():
        make_evil(stage.runs)
    file = stage.folder / "report.html"
    logged = start("report", f"runs/{name}", "--html", str(file), folder=stage.folder)
    assert logged.wait(timeout=600) == 0
    assert file.stat().st_size < 400_000
    visit = Visit(stage.browser, stage.pictures, home=file.as_uri(), is_offline=True)
    stage.visits.append(visit)
    visit.page.goto(file.as_uri())
    visit.page.locator("#chart-loss canvas").wait_for()
    assert visit.requests == [file.as_uri()]
    assert visit.page.locator("#page img").count() == 0
    visit.picture(f"report-{'evil' if name == EVIL_NAME else 'real'}")
    visit.page.emulate_media(media="print")
    visit.picture(f"report-print-{'evil' if name == EVIL_NAME else 'real'}", whole=True)


def test_a_page_reports_a_lost_server(stage: Stage) -> None:
    visit = stage.visit()
    page = visit.page
    expect(page.get_by_role("status").first).to_contain_text("live")
    stage.server.terminate()
    stage.server.wait(timeout=600)
    expect(page.get_by_text("not connected")).to_be_visible()
    # The browser itself logs each failed connection to the console.
    page.goto("about:blank")
    visit.faults = [fault for fault in visit.faults if "ERR_" not in fault]
    shutil.rmtree(stage.runs)
