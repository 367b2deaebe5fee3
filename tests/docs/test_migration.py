"""The programs of the migration pages run, and whet's reach the same validation losses as those of other libraries."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from paths import ROOT
from warm_python import WarmPython

pytestmark = pytest.mark.torch

NEEDS = {
    "from-a-loop.md": (),
    "from-lightning.md": ("lightning",),
    "from-hf-trainer.md": ("transformers", "accelerate"),
    "from-accelerate.md": ("accelerate",),
}
"""The first program of a page needs these libraries; the other programs need whet."""
_WITH_TRANSFORMERS = {"from-hf-trainer.md"}
# Printed with four digits. The fused optimizer rounds differently.
_TOLERANCE = 2e-4


def _programs(page: str) -> tuple[str, list[str]]:
    text = (ROOT / "docs" / page).read_text()
    theirs, *ours = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return theirs, ours


def _run(program: str, folder: Path, warm_python: WarmPython) -> str:
    folder.mkdir(exist_ok=True)
    # Without an accelerator the libraries compute on the CPU, as the comparison needs.
    env = {**os.environ, "WHET_HOME": str(folder / "home"), "CUDA_VISIBLE_DEVICES": ""}
    done = warm_python.run("-c", program, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _val_losses(folder: Path) -> list[float]:
    (events,) = folder.glob("runs/*/events.jsonl")
    lines = map(json.loads, events.read_text().splitlines())
    return [event["val_loss"] for event in lines if event["kind"] == "eval"]


def _missing(libraries: tuple[str, ...]) -> list[str]:
    return [library for library in libraries if find_spec(library) is None]


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow) if page in _WITH_TRANSFORMERS else page for page in NEEDS]
)
def test_both_programs_reach_the_same_losses(page: str, tmp_path: Path, warm_python: WarmPython) -> None:
    theirs, ours = _programs(page)
    if (missing := _missing(NEEDS[page])) and page in _WITH_TRANSFORMERS:
        pytest.skip(f"not installed: {', '.join(missing)}")
    losses = []
    for number, program in enumerate(ours):
        folder = tmp_path / str(number)
        first = _run(program, folder, warm_python)
        losses.append(_val_losses(folder))
        assert f"val_loss {losses[-1][-1]:.4f}" in first
        # The second time nothing is left to train.
        _run(program, folder, warm_python)
        assert _val_losses(folder) == losses[-1]
    assert len(losses[0]) == 3
    assert all(others == losses[0] for others in losses), "the programs of one page train the same"
    if missing:
        pytest.skip(f"whet's programs ran; not installed: {', '.join(missing)}")
    printed = _run(theirs, tmp_path / "theirs", warm_python)
    expected = [float(value) for value in re.findall(r"^epoch \d: val_loss ([\d.]+)", printed, re.MULTILINE)]
    assert losses[0] == pytest.approx(expected, abs=_TOLERANCE)


def test_losses_of_another_batch_size_would_be_noticed(tmp_path: Path, warm_python: WarmPython) -> None:
    theirs, ours = _programs("from-a-loop.md")
    _run(ours[0].replace("batch_size=32", "batch_size=16"), tmp_path / "ours", warm_python)
    printed = _run(theirs, tmp_path / "theirs", warm_python)
    expected = [float(value) for value in re.findall(r"^epoch \d: val_loss ([\d.]+)", printed, re.MULTILINE)]
    assert _val_losses(tmp_path / "ours") != pytest.approx(expected, abs=_TOLERANCE)


@pytest.mark.slow
def test_two_processes_reach_the_same_losses(tmp_path: Path, warm_python: WarmPython) -> None:
    program = _programs("from-a-loop.md")[1][0]
    _run(program, tmp_path / "one", warm_python)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "train.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    env = {**os.environ, "WHET_HOME": str(tmp_path / "home"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path / "two", env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert _val_losses(tmp_path / "two") == pytest.approx(_val_losses(tmp_path / "one"), abs=_TOLERANCE)
