"""Every example runs, and says what its docstring promises."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from warm_python import WarmPython

pytestmark = pytest.mark.torch

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


@pytest.fixture
def run(warm_python: WarmPython, tmp_path: Path) -> Callable[[Path], str]:
    def start(file: Path) -> str:
        env = {**os.environ, "WHET_HOME": str(tmp_path / "home")}
        done = warm_python.run(file, tmp_path / "run", cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return start


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_example_runs(file: Path, run: Callable[[Path], str]) -> None:
    assert SAYS[file.name] in run(file)


@pytest.mark.slow
def test_the_same_command_again_finds_the_run_done(run: Callable[[Path], str]) -> None:
    first = run(EXAMPLES / "three_lines.py")
    assert run(EXAMPLES / "three_lines.py") == first


def test_two_cuts_print_the_same_weights(run: Callable[[Path], str]) -> None:
    lines = run(EXAMPLES / "by_feature" / "token_weights.py").splitlines()
    assert len({line.split()[-1] for line in lines}) == 1


def test_the_tiny_twin_is_100_lines_without_whet() -> None:
    text = (EXAMPLES / "tiny_whet.py").read_text()
    code = [line for line in text.splitlines() if line.strip()]
    assert len(code) <= 100
    assert "import whet" not in text
