"""A run in a notebook: curves as lists, and a plot that is safe whatever the run is called."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import whet
from whet.report.svg import CurveBand, draw_curve_panels
from whet.run.events import EventLog
from whet.run.folder import Run, create_run

HOSTILE = "<script>alert(1)<"


@pytest.fixture(autouse=True, scope="module")
def _waits_for_no_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    run = create_run(
        tmp_path / HOSTILE, recipe=f"{HOSTILE}\x1b]0;", config={}, plan={}, machine={}, versions={}, command=["whet"]
    )
    with EventLog(run) as log:
        log.append("start", step=0, total_steps=30, goal="accuracy", mode="max")
        for step in range(1, 31):
            loss = math.nan if step == 7 else 30.0 / step
            log.append("step", step=step, loss=loss, samples=32 * step, seconds={"data": 0.5})
            if step % 10 == 0:
                log.append("eval", step=step, accuracy=step / 30, **{HOSTILE: 1.0})
    return run.path


def test_an_opened_run_equals_the_run(path: Path) -> None:
    run = whet.open_run(path)
    assert isinstance(run, Run)
    assert run.header.recipe.startswith(HOSTILE)
    assert run.summary().step == 30
    with pytest.raises(whet.WhetError, match="not a run"):
        whet.open_run(path.parent)


def test_curves_are_lists_of_one_length(path: Path) -> None:
    curves = whet.open_run(path).curves()
    assert {"train/loss", "train/samples", "seconds/data", "eval/accuracy", f"eval/{HOSTILE}"} == set(curves)
    loss = curves["train/loss"]
    assert loss["step"] == list(range(1, 31))
    assert loss["samples"] == [32 * step for step in range(1, 31)]
    assert [value for value in loss["mean"] if value == value] == [30.0 / s for s in range(1, 31) if s != 7]
    assert math.isnan(loss["mean"][6])
    assert curves["eval/accuracy"]["mean"] == [10 / 30, 20 / 30, 1.0]
    assert {len(values) for values in loss.values()} == {30}
    assert len(whet.open_run(path).curves(points=5)["train/loss"]["step"]) <= 5


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter() if element.tag.endswith("}text")]


def test_the_plot_shows_loss_and_goal_and_escapes_names(path: Path) -> None:
    run = whet.open_run(path)
    svg = run.plot()._repr_svg_()
    elements = {element.tag.rpartition("}")[2] for element in ET.fromstring(svg).iter()}
    assert elements == {"svg", "title", "style", "rect", "text", "g", "line", "polygon", "polyline", "circle"}
    shown = texts(svg)
    assert shown[0] == f"{HOSTILE}: {HOSTILE} ]0;"
    assert {"train/loss", "eval/accuracy", "step"} <= set(shown)
    assert "eval/" + HOSTILE not in shown
    # A NaN is a gap: two pieces of line.
    panel = svg.partition("eval/accuracy")[0]
    assert panel.count("<polyline") == 2
    by_name = texts(run.plot(HOSTILE, "data", by="samples").svg)
    assert {f"eval/{HOSTILE}", "seconds/data", "samples"} <= set(by_name)
    assert "train/loss" not in by_name


def test_a_missing_curve_is_reported(path: Path, tmp_path: Path) -> None:
    with pytest.raises(whet.WhetError, match="try: accuracy"):
        whet.open_run(path).plot("acuracy")
    with pytest.raises(whet.WhetError, match="no such axis"):
        whet.open_run(path).plot(by="epoch")  # type: ignore[arg-type]
    empty = create_run(tmp_path / "e", recipe="text", config={}, plan={}, machine={}, versions={}, command=[])
    with pytest.raises(whet.WhetError, match="needs points"):
        whet.open_run(path).curves(points=0)
    picture = whet.open_run(empty.path).plot()
    with pytest.raises(whet.WhetError, match="written as SVG"):
        picture.save(tmp_path / "e.png")
    assert "no steps yet" in texts(picture.svg)
    saved = picture.save(tmp_path / "e.svg")
    assert saved.read_text() == picture.svg


@pytest.mark.parametrize(
    "values", [(0.0, 0.0), (1e308, -1e308), (5e-324, 1e-323), (1.0, 1.0 + 1e-16), (math.nan, math.inf), (3.0,)]
)
def test_extreme_numbers_can_be_plotted(values: tuple[float, ...]) -> None:
    line = CurveBand("odd", range(len(values)), values, values, values)
    root = ET.fromstring(draw_curve_panels("t", [line], subtitle="", x_title="step").svg)
    for element in root.iter():
        assert "nan" not in "".join(element.attrib.values())
        assert "inf" not in element.attrib.get("points", "")
