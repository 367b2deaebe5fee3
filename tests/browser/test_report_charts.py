"""Which charts a report has, in a real browser. The runs are simulated."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from browser_visit import Visit
from simulated_run import _waits_for_no_disk, simulated_run  # noqa: F401
from whet.report.page.html import report_page
from whet.report.run_report import summarize
from whet.run.events import EventLog
from whet.run.folder import Run, create_run

pytestmark = pytest.mark.browser


@pytest.fixture
def visits(browser: Browser, pictures: Path) -> Iterator[list[Visit]]:
    made: list[Visit] = []
    yield made
    for visit in made:
        visit.close()


def opened(run: Run, browser: Browser, pictures: Path, visits: list[Visit]) -> Page:
    file = run.path.parent / f"{run.path.name}.html"
    file.write_text(report_page(summarize(run)))
    visits.append(Visit(browser, pictures, home=file.as_uri(), is_offline=True))
    visits[-1].page.goto(file.as_uri())
    return visits[-1].page


def bare(path: Path) -> Run:
    return create_run(path, recipe="text", config={}, plan={}, machine={}, versions={}, command=["whet"])


def charts(page: Page) -> dict[str, tuple[str, list[str]]]:
    """The caption and the names of the curves of each chart, by its title."""
    page.locator(".chart canvas").first.wait_for()
    found = {}
    for chart in page.locator(".chart:not([hidden])").all():
        names = [chip.locator("span").inner_text() for chip in chart.locator(".chip").all()]
        found[chart.locator("h3").inner_text()] = (chart.locator("figcaption .caption").inner_text(), names)
    return found


def test_training_and_validation_loss_share_a_chart(
    browser: Browser, pictures: Path, visits: list[Visit], tmp_path: Path
) -> None:
    page = opened(simulated_run(tmp_path / "text-001"), browser, pictures, visits)
    shown = charts(page)
    assert shown["loss"] == (
        "On training and on validation samples. Lower is better.",
        ["training", "validation"],
    )
    assert shown["accuracy"][0] == "On samples that the model is not trained on. Higher is better."
    assert "cross entropy" not in shown
    assert page.locator("#curves .caption", has_text="Shaded").is_visible()


def test_interruptions_are_labelled_in_the_chart(
    browser: Browser, pictures: Path, visits: list[Visit], tmp_path: Path
) -> None:
    run = bare(tmp_path / "killed")
    with EventLog(run) as log:
        log.append("start", step=0, total_steps=1000)
        for step in range(1, 501):
            log.append("step", step=step, loss=1.0, samples=32 * step)
        log.append("restart", step=500, reason="killed by SIGKILL")
        log.append("resume", step=460)
        for step in range(461, 1001):
            log.append("step", step=step, loss=1.0, samples=32 * step)
        for step in range(900, 990):
            log.append("spike", step=step, reason="the loss is 9")
    page = opened(run, browser, pictures, visits)
    page.locator("#chart-loss canvas").wait_for()
    labels = page.locator("#chart-loss .mark-label")
    texts = labels.all_inner_texts()
    assert texts[:2] == ["killed", "resumed"]
    assert 0 < texts.count("spike") < 20, "what has no room is left out"
    boxes = [label.bounding_box() for label in labels.all()]
    places = {(round(box["y"]), box["x"], box["x"] + box["width"]) for box in boxes if box is not None}
    over = [(a, b) for a in places for b in places if a < b and a[0] == b[0] and a[1] < b[2] and b[1] < a[2]]
    assert over == []
    assert (visits[0].too_wide, visits[0].unreadable) == ([], {})
    page.get_by_label("log scale").check()
    assert labels.all_inner_texts() == texts
    assert page.locator("#chart-speed .mark-label").count() == 0


def test_the_loss_is_the_same_at_the_top_and_in_the_chart(
    browser: Browser, pictures: Path, visits: list[Visit], tmp_path: Path
) -> None:
    run = bare(tmp_path / "r")
    with EventLog(run) as log:
        log.append("start", step=0, total_steps=4_000)
        # A point of the curve is a mean of several steps.
        for step in range(1, 3_001):
            log.append("step", step=step, loss=float(step % 7), samples=32 * step)
    page = opened(run, browser, pictures, visits)
    page.locator("#chart-loss canvas").wait_for()
    figure = str(3_000 % 7)
    assert page.locator(".tile", has_text="training loss").locator("strong").inner_text() == figure
    assert page.locator("#chart-loss .now").inner_text().strip() == figure
    assert page.locator(".tile", has_text="steps").locator(".tile-remark").inner_text() == "of 4,000\n96,000 samples"


def test_related_metrics_are_grouped_and_know_what_is_better(
    browser: Browser, pictures: Path, visits: list[Visit], tmp_path: Path
) -> None:
    run = bare(tmp_path / "r")
    with EventLog(run) as log:
        log.append("start", step=0, total_steps=4, goal="macro_f1", mode="max")
        for step in range(1, 5):
            log.append("step", step=step, loss=1 / step, halt_loss=0.1, value_loss=0.2, samples=step)
            log.append("eval", step=step, accuracy=0.5, macro_f1=0.4, bleu=31.0, perplexity=3.0, closeness=2.0)
    page = opened(run, browser, pictures, visits)
    shown = charts(page)
    held_out = "On samples that the model is not trained on."
    assert list(shown)[:2] == ["loss", "macro f1, accuracy"], "the goal is next to the loss"
    assert shown["macro f1, accuracy"] == (f"{held_out} Higher is better.", ["macro f1", "accuracy"])
    assert shown["bleu"][0] == f"{held_out} Higher is better."
    assert shown["perplexity"][0] == f"{held_out} Lower is better."
    assert shown["closeness"][0] == held_out
    assert shown["halt loss, value loss"] == ("Logged with each step. Lower is better.", ["halt loss", "value loss"])
    assert not page.locator("#curves .caption", has_text="Shaded").is_visible()


def test_each_optimizer_has_its_loss_in_the_chart(
    browser: Browser, pictures: Path, visits: list[Visit], tmp_path: Path
) -> None:
    run = bare(tmp_path / "gan")
    with EventLog(run) as log:
        log.append("start", step=0, total_steps=4, optimizers=["d", "g"])
        for step in range(1, 5):
            log.append("step", step=step, loss=5.0, loss_d=1 / step, loss_g=4.5, samples=step)
    page = opened(run, browser, pictures, visits)
    assert charts(page)["loss"][1] == ["loss d", "loss g"]
    tiles = page.locator(".tile").all_inner_texts()
    assert [tile.split("\n")[:2] for tile in tiles][:2] == [["loss d", "0.25"], ["loss g", "4.5"]]


def test_a_failed_run_shows_its_traceback_at_the_top(
    browser: Browser, pictures: Path, visits: list[Visit], tmp_path: Path
) -> None:
    run = bare(tmp_path / "failed")
    trace = 'Traceback (most recent call last):\n  File "train.py", line 3, in loss\nValueError: <b>7</b>'
    with EventLog(run) as log:
        log.append("start", step=0, total_steps=4)
        log.append("step", step=1, loss=1.0, samples=1, seconds={"data": 9.0, "forward": 1.0})
        log.append("end", step=1, state="failed", reason="failed: ValueError: <b>7</b>", traceback=trace)
    page = opened(run, browser, pictures, visits)
    top = page.locator(".hero")
    assert top.locator(".traceback").inner_text() == trace
    ended, lead = top.locator(".notice.bad").bounding_box(), top.locator(".lead").bounding_box()
    assert ended is not None
    assert lead is not None
    assert ended["y"] < lead["y"]
    assert page.locator("#advice").count() == 0
    assert (visits[0].too_wide, visits[0].unreadable) == ([], {})


def test_the_speed_is_a_rolling_median(browser: Browser, pictures: Path, visits: list[Visit], tmp_path: Path) -> None:
    run = bare(tmp_path / "r")
    with EventLog(run) as log:
        for step in range(1, 101):
            # Every tenth step, and the last one, is ten times slower.
            log.append(
                "step", step=step, loss=1.0, samples=8 * step, seconds={"forward": 1.0 if step % 10 == 0 else 0.1}
            )
    page = opened(run, browser, pictures, visits)
    page.locator(".chart canvas").first.wait_for()
    assert page.locator("#chart-speed .now").inner_text().strip() == "80 samples/s"
