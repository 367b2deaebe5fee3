"""Every example runs and prints what its docstring promises."""

import os
import re
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
    "check_lstm_ctc.py": "error, line 29: MPS has no operator aten::_ctc_loss",
    "average_and_early_stop.py": "done {'accuracy': 0.9",
    "image_classification.py": "all 4 epochs done: accuracy 0.9",
    "lstm_carried_state.py": "the same weights and the same state as without a stop: True",
    "contrastive.py": "all 10 epochs done: loss 1.9",
    "huggingface.py": "all 3 epochs done: accuracy 1.00",
    "gan.py": "all 25 epochs done: the points made have a mean radius of 0.9",
    "reinforcement.py": "all 150 epochs done: 5.0 moves to the corner, 5.0 at least",
    "callback.py": "stopped: the average loss is below 0.3",
}


@pytest.fixture
def run(warm_python: WarmPython, tmp_path: Path) -> Callable[[Path], str]:
    def start(file: Path) -> str:
        env = {**os.environ, "WHET_HOME": str(tmp_path / "home")}
        done = warm_python.run(file, tmp_path / "run", cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return start


# Most of the time of this file. Two of these also run for fewer epochs below.
_LONG = {
    "average_and_early_stop.py",
    "check_gpt.py",
    "contrastive.py",
    "gan.py",
    "huggingface.py",
    "image_classification.py",
    "reinforcement.py",
}


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, marks=pytest.mark.slow) if file.name in _LONG else file for file in FILES],
    ids=lambda file: file.name,
)
def test_the_example_runs(file: Path, run: Callable[[Path], str]) -> None:
    assert SAYS[file.name] in run(file)


def test_the_table_lists_every_example() -> None:
    listed = set(re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text()))
    assert listed == {file.relative_to(EXAMPLES).as_posix() for file in (*FILES, *EXAMPLES.glob("*.ipynb"))}


@pytest.mark.slow
def test_the_same_command_again_finds_the_run_done(run: Callable[[Path], str]) -> None:
    first = run(EXAMPLES / "three_lines.py")
    assert run(EXAMPLES / "three_lines.py") == first


@pytest.mark.parametrize(("place", "is_resumed"), [(r"self.\1 = \2", True), (r"type(self).\1 = \2", False)])
def test_state_is_resumed_in_attributes_but_not_in_classes(
    place: str, is_resumed: bool, run: Callable[[Path], str], tmp_path: Path
) -> None:
    text = (EXAMPLES / "lstm_carried_state.py").read_text()
    planted = re.sub(r'self.register_buffer\("(\w+)", (.*)\)', place, text)
    assert planted != text
    (tmp_path / "lstm.py").write_text(planted)
    assert f"as without a stop: {is_resumed}" in run(tmp_path / "lstm.py")


@pytest.mark.parametrize(("name", "epochs"), [("gan.py", 3), ("reinforcement.py", 30)])
def test_a_custom_loop_that_is_stopped_twice_ends_with_the_same_weights(
    name: str, epochs: int, run: Callable[[Path], str], tmp_path: Path
) -> None:
    text = re.sub(r"\bepochs=\d+", f"epochs={epochs}", (EXAMPLES / name).read_text())
    text, _, _ = text.partition("if not session.is_finished")
    parts = re.sub(r"\bepochs=(\d+)", rf"epochs=\1, epochs_per_session={epochs // 3}", text)
    assert parts != text
    ends = []
    for folder, program, sessions in (("once", text, 1), ("parts", parts, 3)):
        file = tmp_path / f"{folder}.py"
        file.write_text(program.replace("sys.argv[1]", repr(folder)))
        for _ in range(sessions):
            run(file)
        newest = max((tmp_path / folder / "checkpoints").iterdir())
        ends.append([(file.name, file.read_bytes()) for file in sorted(newest.glob("*.safetensors"))])
    assert ends[0]
    assert ends[0] == ends[1]


def test_a_callback_continues_from_its_saved_state(run: Callable[[Path], str]) -> None:
    lines = run(EXAMPLES / "callback.py").splitlines()
    starts = [int(line.split()[2]) for line in lines if line.startswith("starting")]
    ends = [int(line.split()[5]) for line in lines if line.startswith("ending")]
    assert starts == [0, *ends[:-1]]
    assert len(ends) > 1


def test_two_splits_print_the_same_weights(run: Callable[[Path], str]) -> None:
    lines = run(EXAMPLES / "by_feature" / "token_weights.py").splitlines()
    assert len({line.split()[-1] for line in lines}) == 1


def test_the_tiny_twin_is_100_lines_without_whet() -> None:
    text = (EXAMPLES / "tiny_whet.py").read_text()
    code = [line for line in text.splitlines() if line.strip()]
    assert len(code) <= 100
    assert "import whet" not in text
