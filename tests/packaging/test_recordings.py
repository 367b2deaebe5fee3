"""Comparing recordings of runs: processes that fail alike do not count as equal."""

import importlib
import json
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
