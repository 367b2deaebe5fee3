"""Downsampled curves of steps, health and evaluations."""

from pathlib import Path
from typing import Any

import pytest

from whet.run import downsample
from whet.run.curve import downsample_curve, downsample_curves
from whet.run.event_block import BLOCK_EVENTS
from whet.run.events import EventLog, History
from whet.run.folder import EVENTS_FILE


def write(folder: Path, *, steps: int, gap: float = 1_000.0, again_from: int | None = None) -> None:
    """A step each half second; health every 100 steps; an evaluation every 250; a pause of `gap` seconds half-way."""
    now = 5_000.0

    def clock() -> float:
        return now

    log = EventLog(folder, clock=clock)
    log.append("start", step=0)
    step, half = 0, steps // 2
    while step < steps:
        step, now = step + 1, now + 0.5
        log.append("step", step=step, loss=1 / step, samples=8 * step, seconds={"data": 0.25})
        if step % 100 == 0:
            log.append("health", step=step, memory={"process": 1_000 + step}, samples=8 * step)
        if step % 250 == 0:
            log.append("eval", step=step, accuracy=step / 10_000, confusion={"labels": ["a"], "counts": [[1]]})
        if step == half:
            log.close()
            now, half = now + gap, -1
            log = EventLog(folder, clock=clock)
            step = step if again_from is None else again_from
            log.append("resume", step=step)
    log.close()


def test_points_lie_on_three_axes(tmp_path: Path) -> None:
    write(tmp_path, steps=1_000)
    curves = downsample_curves(tmp_path, points=5_000)
    assert curves.keys() == {
        *("step/loss", "step/samples", "step/seconds/data"),
        *("health/memory/process", "health/samples", "eval/accuracy"),
    }
    for name, each in (("step/loss", 1), ("health/memory/process", 100), ("eval/accuracy", 250)):
        assert curves[name].name == name
        assert curves[name].last_step == 1_000
        for number, point in enumerate(curves[name].points, start=1):
            step = number * each
            assert (point.step, point.samples) == (step, 8 * step)
            assert point.time == 5_000 + step / 2 + (1_000 if step > 500 else 0)
            assert point.elapsed == step / 2, "the pause does not count"
            assert point.low == point.mean == point.high
    assert [p.mean for p in curves["eval/accuracy"].points] == [0.025, 0.05, 0.075, 0.1]


@pytest.mark.parametrize("is_growing", [False, True])
def test_long_runs_are_drawn_from_the_index_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_growing: bool
) -> None:
    write(tmp_path, steps=40 * BLOCK_EVENTS)
    exact = downsample_curves(tmp_path, points=100)
    monkeypatch.setattr(downsample, "_MAX_EVENTS_READ", 10)
    history = History(tmp_path)
    monkeypatch.setattr("whet.run.events.open_regular_file", lambda *_: pytest.fail("events were read"))
    coarse = downsample_curves(history, points=20, is_growing=is_growing)
    assert coarse.keys() == exact.keys()
    for name, curve in coarse.items():
        assert 10 <= len(curve.points) <= 20
        assert curve.last_step >= exact[name].last_step
        for extreme, field in ((min, "low"), (max, "high")):
            ours, theirs = (extreme(getattr(p, field) for p in c.points) for c in (curve, exact[name]))
            assert ours == theirs
        for point in curve.points:
            assert 0 <= point.samples - 8 * point.step <= 8, "a block may begin before its first step"
            assert point.elapsed == pytest.approx(point.step / 2, abs=0.6)
    assert downsample_curve(history, field="memory/process", kind="health", points=20).points[0].low == 1_100


def test_void_steps_are_in_no_curve_but_health_is(tmp_path: Path) -> None:
    write(tmp_path, steps=1_000, again_from=120)
    curves = downsample_curves(tmp_path, points=5_000)
    assert [p.step for p in curves["step/loss"].points] == list(range(1, 1_001))
    assert [p.step for p in curves["eval/accuracy"].points] == [250, 500, 750, 1_000]
    assert all(p.time > 6_000 for p in curves["eval/accuracy"].points)
    # Health is never void: memory before a kill is worth seeing.
    assert [p.step for p in curves["health/memory/process"].points] == list(range(100, 1_001, 100))
    assert curves["health/memory/process"].points[1].time == 5_000 + 200 / 2


def test_only_the_valid_kinds_of_void_blocks_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, steps=60 * BLOCK_EVENTS, again_from=10)
    sizes: list[int] = []
    read = History._read

    def noting(self: History, positions: list[int], *, kinds: Any, newest_first: bool = False) -> Any:
        sizes.extend(len(positions) for _ in [0] if kinds is None)
        return read(self, positions, kinds=kinds, newest_first=newest_first)

    monkeypatch.setattr(History, "_read", noting)
    blocks = list(History(tmp_path).valid_blocks())
    assert sizes == [1], "the one block that the resume cuts in two"
    assert sum(block.kinds.get("step", 0) for block in blocks) == 60 * BLOCK_EVENTS
    assert sum(block.kinds.get("health", 0) for block in blocks) > 60 * BLOCK_EVENTS // 100


def test_an_absurd_number_of_samples_is_unknown(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    for step, samples in ((1, 8), (2, 10**300), (3, -(10**300))):
        log.append("step", step=step, loss=1.0, samples=samples)
    log.close()
    points = downsample_curves(tmp_path, points=10)["step/loss"].points
    assert [point.samples for point in points] == [8, None, None]


def test_a_changed_line_does_not_hide_its_neighbours(tmp_path: Path) -> None:
    """Events are read at the position in the index; if the data there differs, the whole block is read."""
    write(tmp_path, steps=400)
    events = tmp_path / EVENTS_FILE
    block = History(tmp_path).layout.blocks[1]
    lines = events.read_bytes()[block.start : block.end].splitlines(keepends=True)
    # The size of the file stays the same, but everything between these two lines moves by three bytes.
    lines[10] = lines[10].replace(b"{", b"{   ", 1)
    lines[-5] = lines[-5].replace(b"0.25", b"1")
    events.write_bytes(events.read_bytes()[: block.start] + b"".join(lines))
    history = History(tmp_path)
    assert history.layout.num_indexed == len(history.layout.blocks), "the index could not know"
    assert [e.step for e in history.events(kinds=("eval",))] == [250]
    assert [e.step for e in history.events(kinds=("health",))] == [100, 200, 300, 400]
