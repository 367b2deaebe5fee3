"""Exports contain every valid number once and unrounded, and appear completely or not at all."""

import csv
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paths import ROOT, SUPPORT
from paths import Run as Whet
from whet.base.errors import UsageError, WhetError
from whet.report.export.files import export_run
from whet.run.event_block import BLOCK_EVENTS
from whet.run.events import EventLog
from whet.run.folder import EVENTS_FILE, INDEX_FILE, Run, create_run

HOSTILE = "=cmd|' /C calc'!A0,\"\n<script>"


@pytest.fixture(autouse=True, scope="module")
def _waits_for_no_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def step(log: EventLog, number: int, loss: float) -> None:
    seconds = {"data": 0.1 + number, "forward": 0.2}
    log.append("step", step=number, loss=loss, lr=1 / 3, samples=32 * number, word="text", seconds=seconds)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """More steps than a block of the index has; ten of them are void, made again with another loss."""
    run = create_run(
        tmp_path / "runs" / "r", recipe="text", config={}, plan={}, machine={}, versions={}, command=["whet"]
    )
    with EventLog(run) as log:
        log.append("start", step=0, total_steps=BLOCK_EVENTS + 50)
        for number in range(1, BLOCK_EVENTS + 41):
            step(log, number, loss=100.0 + number)
        log.append("eval", step=BLOCK_EVENTS + 40, accuracy=0.1)
        log.append("health", step=BLOCK_EVENTS + 40, memory={"process": 5}, heat="cool")
    with EventLog(run) as log:
        log.append("resume", step=BLOCK_EVENTS + 30)
        for number in range(BLOCK_EVENTS + 31, BLOCK_EVENTS + 51):
            step(log, number, loss=math.nan if number == BLOCK_EVENTS + 50 else 1 / number)
        log.append("eval", step=BLOCK_EVENTS + 50, accuracy=0.5, **{HOSTILE: 1.5}, samples=[{"text": "no number"}])
        log.append("eval", step=BLOCK_EVENTS + 50, test_accuracy=0.25, large=-1e300)
        log.append("health", step=BLOCK_EVENTS + 50, memory={"process": 7}, heat="hot")
    with (run.path / EVENTS_FILE).open("ab") as file:
        file.write(b'{"kind":"step","time":1.0,"step":999,"loss":')  # Torn.
    return run


def expected_losses() -> list[float]:
    last = BLOCK_EVENTS + 50
    return [100.0 + s if s <= last - 20 else math.nan if s == last else 1 / s for s in range(1, last + 1)]


def same(left: list[float], right: list[float]) -> bool:
    return [repr(number) for number in left] == [repr(number) for number in right]


def test_csv_has_each_step_once_and_unrounded(run: Run, tmp_path: Path) -> None:
    written = export_run(run, to="csv", out=tmp_path / "out")
    assert set(written.files) == {"steps.csv", "evaluations.csv", "health.csv"}
    with (tmp_path / "out" / "steps.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["step", "time", "loss", "lr", "samples", "seconds/data", "seconds/forward"]
    assert [int(row["step"]) for row in rows] == list(range(1, BLOCK_EVENTS + 51))
    assert same([float(row["loss"]) for row in rows], expected_losses())
    assert float(rows[6]["lr"]) == 1 / 3
    assert float(rows[6]["seconds/data"]) == 7.1
    assert rows[6]["samples"] == "224"
    with (tmp_path / "out" / "evaluations.csv").open(newline="") as file:
        header, *evaluations = csv.reader(file)
    # A spreadsheet would evaluate a cell that begins with =.
    assert header == ["step", "time", "accuracy", f"'{HOSTILE}", "test_accuracy", "large"]
    assert [row[2:] for row in evaluations] == [["0.5", "1.5", "", ""], ["", "", "0.25", "-1e+300"]]
    with (tmp_path / "out" / "health.csv").open(newline="") as file:
        assert [row["memory/process"] for row in csv.DictReader(file)] == ["5", "7"]


def test_tensorboard_reads_it_with_its_own_reader(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    export_run(run, to="tensorboard", out=tmp_path / "out")
    code = (
        "import json, sys\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "read = EventAccumulator(sys.argv[1], size_guidance={'scalars': 0}).Reload()\n"
        "tags = read.Tags()['scalars']\n"
        "print(json.dumps({tag: [(e.step, e.wall_time, e.value) for e in read.Scalars(tag)] for tag in tags}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    losses = [value for _, _, value in read["train/loss"]]
    assert [number for number, _, _ in read["train/loss"]] == list(range(1, BLOCK_EVENTS + 51))
    assert losses[:-1] == pytest.approx(expected_losses()[:-1], rel=1e-6)
    assert math.isnan(losses[-1])
    assert len(read["seconds/data"]) == BLOCK_EVENTS + 50
    assert [(number, value) for number, _, value in read["eval/accuracy"]] == [(BLOCK_EVENTS + 50, 0.5)]
    assert f"eval/{HOSTILE}" in read
    assert read["eval/large"][0][2] == pytest.approx(-3.4028235e38)
    # Health was logged at a repeated step; the curve must not go back.
    assert [(number, value) for number, _, value in read["health/memory/process"]] == [(BLOCK_EVENTS + 50, 7.0)]


def test_nothing_heavy_is_loaded(run: Run, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom whet.report.export.files import export_run\n"
        f"export_run({str(run.path)!r}, to='csv', out={str(tmp_path / 'out')!r})\n"
        "print({'torch', 'numpy', 'tensorboard', 'tensorflow', 'pyarrow'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("to", ["csv", "tensorboard"])
def test_lone_surrogates_and_runs_without_steps_are_exported(run: Run, tmp_path: Path, to: str) -> None:
    if to != "csv":
        pytest.importorskip(to)
    with (run.path / EVENTS_FILE).open("wb") as file:
        file.write(b'{"kind":"eval","time":1.0,"step":1,"\\ud800":2.0}\n')
    (run.path / INDEX_FILE).unlink()
    assert all(export_run(run, to=to, out=tmp_path / "one").files.values())
    (run.path / EVENTS_FILE).write_bytes(b"")
    assert all(export_run(run, to=to, out=tmp_path / "none").files.values())


def test_a_failed_export_keeps_the_old_one(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with EventLog(run) as log:
        log.append("step", step=2**63, loss=1.0)
    with pytest.raises(WhetError, match="damaged"):
        export_run(run, to="csv", out=out)
    assert not out.parent.exists()
    out.mkdir(parents=True)
    (out / "steps.csv").write_text("old")
    with pytest.raises(WhetError, match="damaged"):
        export_run(run, to="csv", out=out, force=True)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert (out / "steps.csv").read_text() == "old"


def test_only_an_export_is_replaced_and_only_with_force(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_run(run, to="csv", out=out)
    with pytest.raises(UsageError, match="already exists"):
        export_run(run, to="csv", out=out)
    (out / "steps.csv").write_text("old")
    export_run(run, to="csv", out=out, force=True)
    assert (out / "steps.csv").read_text() != "old"
    (out / "thesis.tex").write_text("mine")
    for to in ("csv", "tensorboard"):
        with pytest.raises(UsageError, match="other files than an export"):
            export_run(run, to=to, out=out, force=True)
    assert (out / "thesis.tex").read_text() == "mine"
    for inside in (run.path, run.path / "csv"):
        with pytest.raises(UsageError, match="inside the run"):
            export_run(run, to="csv", out=inside, force=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="not a folder"):
        export_run(run, to="csv", out=tmp_path / "link", force=True)


def test_the_command(run: Run, tmp_path: Path, whet: Whet) -> None:
    done = whet("export", "runs/r", "--to", "csv")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("r-csv/steps.csv")
    assert (tmp_path / "r-csv" / "evaluations.csv").exists()
    wrong = whet("export", "runs/r", "--to", "cvs")
    assert (wrong.returncode, wrong.stderr) == (2, "error: unknown format\n  got: cvs\n  try: --to csv\n")


@pytest.mark.slow
def test_the_examples_of_the_page_run(run: Run, tmp_path: Path, whet: Whet) -> None:
    """With simulated dashboards; the rest is real."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    page = (ROOT / "docs" / "exports.md").read_text()
    commands = re.findall(r"^\$ whet (.*)$", page, re.MULTILINE)
    assert len(commands) == 4
    run.path.rename(run.path.parent / "text-001")
    for number, command in enumerate(commands):
        path = os.pathsep.join([str(SUPPORT / "simulated_dashboards"), os.environ.get("PYTHONPATH", "")])
        environment = {"PYTHONPATH": path, "SIMULATED_DASHBOARD": str(tmp_path / f"kept-{number}")}
        once = ["--once"] if command.startswith("forward") and "--once" not in command else []
        done = whet(*shlex.split(command), *once, **environment)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    read = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True)
    assert read.stdout.startswith(f"{BLOCK_EVENTS + 50} "), read.stderr
    assert (tmp_path / "loss.svg").exists()
