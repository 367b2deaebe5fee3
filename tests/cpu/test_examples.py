"""Every example runs, and says what its docstring promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
FILES = sorted(EXAMPLES.rglob("*.py"))
SAYS = {
    "three_lines.py": "done after 126 steps",
    "own_loop.py": "step 120: error 0.0",
    "tiny_whet.py": "55 steps, loss",
    "token_weights.py": "micro-batch  5",
    "check_convnet.py": "5,422,056 parameters, 0 findings",
    "check_gpt.py": "warning, line 46: .item() waits",
    "check_lstm_ctc.py": "error, line 28: MPS has no operator aten::_ctc_loss",
    "average_and_early_stop.py": "done {'accuracy': 0.9",
}


def run(file: Path, folder: Path) -> str:
    command = [sys.executable, str(file), str(folder / "run")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WHET_HOME": str(folder / "home")}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_example_runs(file: Path, tmp_path: Path) -> None:
    assert SAYS[file.name] in run(file, tmp_path)


@pytest.mark.slow
def test_the_same_command_again_finds_the_run_done(tmp_path: Path) -> None:
    first = run(EXAMPLES / "three_lines.py", tmp_path)
    assert run(EXAMPLES / "three_lines.py", tmp_path) == first


def test_two_cuts_print_the_same_weights(tmp_path: Path) -> None:
    lines = run(EXAMPLES / "by_feature" / "token_weights.py", tmp_path).splitlines()
    assert len({line.split()[-1] for line in lines}) == 1


def test_the_tiny_twin_is_100_lines_without_whet() -> None:
    text = (EXAMPLES / "tiny_whet.py").read_text()
    code = [line for line in text.splitlines() if line.strip()]
    assert len(code) <= 100
    assert "import whet" not in text
