"""Comparing recordings of runs: processes that fail alike do not count as equal."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paths import ROOT
from whet.config.options import SessionOptions


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("recordings")


def write(folder: Path, *exit_codes: int) -> Path:
    folder.mkdir()
    recording = {"exit_codes": exit_codes, "expected_exit_codes": [143, 0], "weights_at_exit": None, "runs": {}}
    (folder / "text.stopped.json").write_text(json.dumps(recording))
    return folder


def test_an_unexpected_exit_code_on_both_sides_is_a_difference(
    recordings: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = write(tmp_path / "good", 143, 0), write(tmp_path / "bad", 143, 2)
    assert recordings.compare(good, good, {}, shown=5)
    assert not recordings.compare(bad, bad, {}, shown=5)
    assert "before: process 1 ended with 2, expected 0" in capsys.readouterr().out


def test_expected_exit_codes_follow_from_signals(recordings: Any) -> None:
    codes = {
        case.name: [segment.exit_code for segment in case.segments] for case in recordings.cases(ROOT / "examples")
    }
    assert codes["text.straight"] == [0]
    assert codes["text.killed"] == [-9, 0]
    assert codes["text.interrupted"] == [130, 0]
    assert codes["own_loop.stopped"] == [143, 0]
    assert codes["three_lines.stopped"] == [0, 0], "the script returns after whet.train"


def test_recorded_commands_use_options_that_exist(recordings: Any) -> None:
    by_epoch = next(case for case in recordings.cases(ROOT / "examples") if case.name == "hex.by-epoch")
    given = {word.partition("=")[0] for word in by_epoch.segments[0].command if "epochs" in word}
    assert given == {"epochs", "epochs_per_session"} <= SessionOptions.model_fields.keys()


@pytest.mark.torch
def test_counting_the_steps_of_a_run_adds_no_warning(tmp_path: Path) -> None:
    """The signal is sent after the second step; the weights are those of the optimizer that stepped last."""
    program = tmp_path / "program.py"
    program.write_text("""
import torch, whet
model = torch.nn.Linear(2, 1)
data = torch.utils.data.TensorDataset(torch.randn(64, 2), torch.randn(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
def loss(batch): return (model(batch[0]) - batch[1]).square().mean()
options = {"max_steps": 9, "global_batch_size": 4, "device": "cpu", "measure": False}
whet.train(model, data, loss=loss, optimizer=optimizer, run="run", **options)
""")
    weights = tmp_path / "weights.json"
    child = [sys.executable, ROOT / "tools" / "recordings.py", "child", weights, "TERM", "2", program]
    done = subprocess.run(child, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["reason"] for event in events if event["kind"] == "warning"] == []
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2]
    assert len(json.loads(weights.read_text())) == 64
