"""A live history equals a fresh one, whatever happens to the file between two refreshes."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.run import follow
from whet.run.curve import Curve, downsample_curves
from whet.run.events import EventLog, History
from whet.run.folder import EVENTS_FILE, INDEX_FILE
from whet.run.follow import LiveHistory

acts = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 40)),
        st.tuples(st.just("step"), st.integers(250, 600)),  # Many steps at once, so that blocks fill up.
        st.tuples(st.just("resume"), st.integers(0, 900)),
        st.tuples(st.sampled_from(["eval", "health"]), st.just(0)),
        st.tuples(st.sampled_from(["reopen", "tear", "no index"]), st.just(0)),
        st.tuples(st.just("look"), st.just(0)),
    ),
    max_size=14,
)


class Writer:
    """Plays a run into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.step, self.now = folder, 0, 100.0
        self.log = self._open()

    def _open(self) -> EventLog:
        return EventLog(self.folder, clock=lambda: self.now)

    def act(self, what: str, number: int) -> None:
        if what == "reopen":
            self.log.close()
            self.now += 1_000
            self.log = self._open()
        elif what == "tear":
            # As after a kill during a write; the next writer truncates it.
            self.log.close()
            with (self.folder / EVENTS_FILE).open("ab") as file:
                file.write(b'{"kind":"step","ti')
            self.log = self._open()
        elif what == "no index":
            self.log.close()
            (self.folder / INDEX_FILE).unlink()
            self.log = self._open()
        elif what == "resume":
            self.step = min(self.step, number)
            self.log.append("resume", step=self.step)
        else:
            for _ in range(max(1, number)):
                self.now += 0.5
                self.step += what == "step"
                fields: dict[str, Any] = {"loss": 1 / (1 + self.step), "samples": 8 * self.step}
                if what == "health":
                    fields = {"memory": {"process": 1000 + self.step}, "samples": 8 * self.step}
                elif what == "eval":
                    fields = {"accuracy": self.step / 1000, "samples": [{"input": "x"}]}
                self.log.append(what, step=self.step, **fields)
        self.log.flush()


def same(live_one: LiveHistory, fresh: History) -> None:
    assert list(live_one) == list(fresh)
    assert live_one.layout.end == fresh.layout.end
    assert live_one.layout.torn_bytes == fresh.layout.torn_bytes
    assert live_one.damaged == fresh.damaged
    for options in ({"points": 1_000}, {"points": 64, "is_growing": True}):
        assert downsample_curves(live_one, **options) == downsample_curves(fresh, **options)
    # Block by block; the blocks of a live history may differ.
    assert extremes(downsample_curves(live_one, points=1)) == extremes(downsample_curves(fresh, points=1))


def extremes(curves: dict[str, Curve]) -> dict[str, tuple[object, ...]]:
    return {
        name: (min(p.low for p in c.points), max(p.high for p in c.points), c.last_step) for name, c in curves.items()
    }


@given(acts, st.sampled_from([0, 10**9]))
def test_a_live_history_equals_a_fresh_one(script: list[tuple[str, int]], leap: int) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(follow, "_REINDEX_BYTES", leap)
        writer = Writer(Path(name))
        watched = LiveHistory(Path(name))
        before = [*History(Path(name))]
        for act, number in [*script, ("look", 0)]:
            if act != "look":
                writer.act(act, number)
                continue
            news = watched.refresh()
            same(watched, History(Path(name)))
            now = [*History(Path(name))]
            assert news == "grown" if now != before else news in ("grown", "unchanged")
            assert watched.refresh() == "unchanged"
            before = now
        writer.log.close()


def test_a_torn_last_line_is_ignored_until_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    path.write_bytes(b'{"kind":"step","time":1.0,"step":1,"loss":1.0}\n{"kind":"ev')
    watched = LiveHistory(tmp_path)
    assert [e.step for e in watched] == [1]
    assert watched.layout.torn_bytes == 11
    with path.open("ab") as file:
        file.write(b'al","time":2.0,"step":1')
    assert watched.refresh() == "unchanged"
    with path.open("ab") as file:
        file.write(b',"accuracy":0.5}\n{')
    assert watched.refresh() == "grown"
    assert [(e.kind, e.number("accuracy")) for e in watched][1:] == [("eval", 0.5)]
    assert watched.layout.torn_bytes == 1


@pytest.mark.parametrize("how", ["another file", "rewritten", "shorter"])
def test_a_replaced_file_is_read_from_its_beginning(tmp_path: Path, how: str) -> None:
    writer = Writer(tmp_path)
    writer.act("step", 300)
    writer.log.close()
    watched = LiveHistory(tmp_path)
    downsample_curves(watched, points=10)
    path = tmp_path / EVENTS_FILE
    data = path.read_bytes()
    if how == "another file":
        (tmp_path / "new").write_bytes(data)
        (tmp_path / "new").replace(path)
    elif how == "rewritten":
        path.write_bytes(data.replace(b'"loss"', b'"cost"') + data.splitlines(keepends=True)[-1])
    else:
        os.truncate(path, len(data) // 2)
    assert watched.refresh() == "replaced"
    same(watched, History(tmp_path))
    assert watched.refresh() == "unchanged"


def test_a_missing_run_and_a_removed_one(tmp_path: Path) -> None:
    watched = LiveHistory(tmp_path)
    assert watched.refresh() == "unchanged"
    writer = Writer(tmp_path)
    writer.act("step", 3)
    assert watched.refresh() == "grown"
    assert len(list(watched)) == 3
    drawn = downsample_curves(watched, points=5)
    assert drawn["step/loss"].last_step == 3
    (tmp_path / EVENTS_FILE).rename(tmp_path / "elsewhere")
    assert watched.refresh() == "unchanged"
    assert downsample_curves(watched, points=5) == drawn
    writer.log.close()


def test_only_new_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path)
    writer.act("step", 5_000)
    watched = LiveHistory(tmp_path)
    downsample_curves(watched, points=100)
    starts: list[int] = []
    scan = follow.scan_blocks
    monkeypatch.setattr(
        follow, "scan_blocks", lambda file, start, size: starts.append(start) or scan(file, start=start, size=size)
    )
    monkeypatch.setattr(follow, "read_log_layout", lambda *a, **k: pytest.fail("the whole was read again"))
    for _ in range(5):
        writer.act("step", 100)
        assert watched.refresh() == "grown"
        assert (tmp_path / EVENTS_FILE).stat().st_size - starts[-1] < 60_000
    assert downsample_curves(watched, points=100)["step/loss"].last_step == 5_500
    writer.log.close()


def test_curves_of_a_long_run_follow_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet.run.downsample._MAX_EVENTS_READ", 5)
    writer = Writer(tmp_path)
    for _ in range(12):
        writer.act("step", 250)
        writer.act("health", 0)
    watched = LiveHistory(tmp_path)
    for number in range(12):
        fresh = History(tmp_path)
        fresh._set_layout(watched.layout)  # The same blocks, and nothing kept.
        for options in ({"points": 5}, {"points": 8, "is_growing": True}):
            assert downsample_curves(watched, **options) == downsample_curves(fresh, **options)
        writer.act("step", 200)
        writer.act("health", 0)
        if number == 8:
            writer.act("resume", writer.step - 700)
            writer.act("step", 10)
        watched.refresh()
    writer.log.close()


def test_points_of_a_growing_run_stay_where_they_are(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    watched = LiveHistory(tmp_path)
    shown: list[int] = []
    changes = 0
    for _ in range(40):
        writer.act("step", 10)
        watched.refresh()
        steps = [point.step for point in downsample_curves(watched, points=64, is_growing=True)["step/loss"].points]
        assert len(steps) <= 64
        assert len(steps) > 32 or writer.step <= 64
        if steps[: len(shown)] != shown:
            changes += 1
            assert {step for step in steps if shown[0] <= step <= shown[-1]} <= {*shown}
        shown = steps
    assert changes == 3  # from 64 steps to 400: the width was doubled three times
    writer.log.close()
