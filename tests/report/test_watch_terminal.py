"""`whet watch --terminal`: fits any size, updates, restores the terminal, and ignores control characters."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len

from hostile_names import create_renamed_run
from paths import Run as RunWhet
from pseudo_terminal import PseudoTerminal
from whet.cli.main import run as run_command
from whet.report.text_chart import sparkline
from whet.report.watch import terminal as terminal_module
from whet.report.watch.terminal import BoardReader, TerminalArea, board_rows, render_board
from whet.run.curve import downsample_curve
from whet.run.events import EventLog
from whet.run.folder import EVENTS_FILE, Run
from whet.run.lock import acquire

HOSTILE = "text\x1b[2J\x1b]0;owned\x07 <b>\u202e\u65e5\u672c"
WATCH = [sys.executable, "-m", "whet", "watch", "--terminal"]


@pytest.fixture(autouse=True)
def _waits_for_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def make(path: Path, *, steps: int = 40, state: str | None = "done", loss: float = 2.0) -> Run:
    run = create_renamed_run(
        path,
        recipe="text",
        config={},
        plan={"settings": {"device": {"value": "mps"}}},
        machine={},
        versions={},
        command=["whet", "train", "text"],
    )
    with EventLog(run) as log:
        log.append("start", step=0, total_steps=100, goal="accuracy", mode="max")
        for step in range(1, steps + 1):
            log.append("step", step=step, epoch=0, samples=step * 32, loss=loss / step)
        log.append("eval", step=steps, accuracy=0.75)
        if state:
            log.append("end", step=steps, state=state)
    return run


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[PseudoTerminal]:
    started = PseudoTerminal(WATCH, columns=100, rows=30, cwd=tmp_path)
    yield started
    started.close()


def test_a_live_run_is_updated_and_the_terminal_restored(tmp_path: Path, terminal: PseudoTerminal) -> None:
    terminal.wait_for(lambda seen: "no runs in runs yet" in seen)
    make(tmp_path / "runs" / "old")
    run = make(tmp_path / "runs" / HOSTILE, state=None)
    with acquire(run.path), EventLog(run) as log:
        terminal.wait_for(lambda seen: "running" in seen and "40 of 100" in seen)
        log.append("step", step=41, epoch=0, samples=1312, loss=0.125)
        log.append("warning", step=41, reason="odd \x1b[31mred\x1b]52;c;AAAA\x07 \x9b2J", again="never")
        log.append("checkpoint", step=41, name="step-000000041", bytes=2**20)
        seen = terminal.wait_for(lambda seen: "41 of 100" in seen and "saved step-000000041 (1 MB)" in seen)
        assert "odd  [31mred ]52;c;AAAA   2J" in seen
        terminal.resize(44, 12)
        terminal.wait_for(lambda seen: "41 of 100" in seen and len(seen.split("\n")) == 12)
        assert all(cell_len(line) <= 44 for line in terminal.screen)
    terminal.wait_for(lambda seen: "running" not in seen and "stopped" in seen)
    # Ctrl-Z would leave the shell in the alternate screen.
    terminal.type("\x1a")
    make(tmp_path / "runs" / "new")
    terminal.wait_for(lambda seen: "3 runs" in seen)
    terminal.type("\x03")
    assert terminal.end() == 0
    assert terminal.now() == terminal.modes
    assert terminal.sent.endswith("\x1b[?25h\x1b[?1049l")
    assert terminal.steered == []


def test_without_a_terminal_it_prints_plain_lines_once(whet: RunWhet, tmp_path: Path) -> None:
    make(tmp_path / "runs" / HOSTILE, state="failed")
    done = whet("watch", "--terminal", "runs", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert done.stdout.isascii()
    for words in ("failed", "40 of 100", "accuracy 0.75", "on mps", "resume", "whet train text --run"):
        assert words in done.stdout
    wrong = whet("watch", "--terminal", "runs/none/events.jsonl")
    assert "no runs in runs/none" in wrong.stdout


def test_a_search_below_the_runs_is_mentioned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def watched(*words: str) -> str:
        assert run_command(["watch", *words, "--once"]) == 0
        return capfd.readouterr().out

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "home"))
    for number in range(7):
        make(tmp_path / "runs" / "my search" / f"trial-{number}", steps=1)
    logged = "runs/my search contains 7 more: whet watch 'runs/my search' --terminal"
    alone = watched().splitlines()
    assert [line.strip() for line in alone] == ["no runs in runs itself", logged]
    make(tmp_path / "runs" / "text-001")
    assert logged in watched()
    assert "more" not in watched("runs/text-001")
    for number in range(4):
        make(tmp_path / "runs" / f"search-{number}" / "trial-0", steps=1)
    assert "and 2 more such folders" in watched()


@pytest.mark.parametrize("unicode", [True, False], ids=["unicode", "ascii"])
def test_it_fits_every_size(tmp_path: Path, unicode: bool) -> None:
    for number, name in enumerate(("a" * 90, "\u65e5\u672c" * 20, "c", "d")):
        make(tmp_path / name, steps=number + 1, state=None if number % 2 else "failed")
    (tmp_path / "c" / "plan.json").write_text("{")
    make(tmp_path / ("\u65e5\u672c" * 20 + "a") / "trial", steps=1)
    reader = BoardReader(tmp_path)
    for width in (24, 40, 61, 80, 200):
        for height in (4, 7, 12, 24, 60):
            board = reader.read(rows=board_rows(height))
            drawn = render_board(board, TerminalArea(width=width, height=height, unicode=unicode))
            assert len(drawn) <= height
            assert max(cell_len(line.plain) for line in drawn) <= width
            assert unicode or all(line.plain.isascii() for line in drawn)


def test_only_shown_and_changed_runs_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make(tmp_path / f"text-{number:03d}") for number in range(30)]
    read: list[str] = []

    def counted(path: Path) -> Run:
        read.append(path.name)
        return open_run(path)

    open_run = terminal_module.open_run
    monkeypatch.setattr(terminal_module, "open_run", counted)
    reader = BoardReader(tmp_path)
    first = reader.read(rows=5)
    assert (first.num_runs, len(first.rows), len(read)) == (30, 5, 5)
    shown = first.rows[2].path
    reader.read(rows=5)
    assert len(read) == 5
    with EventLog(shown) as log:
        log.append("step", step=77, loss=1.0)
    again = reader.read(rows=5)
    assert read[5:] == [shown.name]
    assert 77 in [row.step for row in again.rows]
    # The log does not show that a process started or died.
    with acquire(runs[first.first].path):
        assert "running" in [row.state for row in reader.read(rows=5).rows]
    assert "running" not in [row.state for row in reader.read(rows=5).rows]


def test_a_torn_line_is_not_counted_and_a_dead_process_is_reported(tmp_path: Path) -> None:
    run = make(tmp_path / "torn", state=None)
    with (run.path / EVENTS_FILE).open("ab") as file:
        file.write(b'{"kind":"step","time":1,"step":41,"lo')
    row = BoardReader(run.path).read(rows=3).rows[0]
    assert (row.state, row.step, row.loss) == ("stopped", 40, 2.0 / 40)
    assert row.recent[0].text == "the training process died without a message"
    assert row.resume is not None


def test_a_run_that_is_being_copied_is_shown_when_complete(tmp_path: Path) -> None:
    path = make(tmp_path / "copied").path
    config = path / "config.json"
    config.rename(tmp_path / "config.json")
    reader = BoardReader(tmp_path)
    (row,) = reader.read(rows=5).rows
    assert (row.state, row.updated) == ("unreadable", pytest.approx((path / EVENTS_FILE).stat().st_mtime))
    (tmp_path / "config.json").rename(config)
    (row,) = reader.read(rows=5).rows
    assert (row.state, row.step) == ("done", 40)


def test_memory_load_and_heat_are_those_read_last(tmp_path: Path) -> None:
    run = make(tmp_path / "healthy", state=None)
    memory = {"allocated": 2**30, "reserved": 3 * 2**30, "limit": 2**32, "used": 6e9, "available": 2e9, "swap": 2**20}
    health = {"memory": memory, "utilization": {"cpu": 25, "gpu": 90}, "heat": "hot", "thermal": "serious"}
    with (run.path / EVENTS_FILE).open("a") as file:
        file.write(json.dumps({"kind": "health", "time": 1.0, "step": 40, **health}) + "\n")
    with acquire(run.path):
        board = BoardReader(tmp_path).read(rows=3)
        text = "\n".join(line.plain for line in render_board(board, TerminalArea(width=120, height=None)))
    for words in ("3 GB of 4 GB", "machine 5.6 GB of 7.5 GB", "swap 1 MB", "90 % busy", "25 % busy", "hot, serious"):
        assert words in text


def test_slower_steps_are_not_called_hot_without_a_sensor(tmp_path: Path) -> None:
    run = make(tmp_path / "slow", state=None)
    with EventLog(run) as log:
        log.append("throttle", step=40, cause="heat", state="hot", factor=2.4, since_step=20)
        log.append("health", step=40, heat="hot", memory={"process": 2**30})
    with acquire(run.path):
        (row,) = BoardReader(tmp_path).read(rows=3).rows
    assert row.load.heat == "2.4x slower, no heat sensor"


def test_a_sparkline_has_its_width_and_gaps_at_nan(tmp_path: Path) -> None:
    run = make(tmp_path / "sparkling", steps=50)
    with EventLog(run) as log:
        for step in range(51, 76):
            log.append("step", step=step, loss=float("nan"))
        for step in range(76, 101):
            log.append("step", step=step, loss=2.0)
    drawn = sparkline(
        [point.mean for point in downsample_curve(run, field="loss", points=100).points], width=20, unicode=False
    )
    assert len(drawn) == 20
    assert drawn[0] != drawn[9] == "_"
    assert drawn[10:15] == " " * 5
    assert drawn[15:] == "#" * 5
