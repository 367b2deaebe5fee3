"""`whet prove FILE.py:function`: a training of the user's own script is killed, resumed and compared."""

import json
from pathlib import Path

import pytest

from paths import SUPPORT, Run

pytestmark = pytest.mark.torch

SCRIPT = str(SUPPORT / "script_training.py")
QUICK = ("--seed", "3", "--kills", "2", "--steps", "12", "--budget", "2")


@pytest.mark.parametrize("function", ["main", pytest.param("own_loop", marks=pytest.mark.slow)])
def test_a_script_is_proved(warm_whet: Run, tmp_path: Path, function: str) -> None:
    done = warm_whet("prove", f"{SCRIPT}:{function}", *QUICK, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    proof = json.loads(done.stdout)
    assert (proof["verdict"], proof["recipe"]) == ("proved", "script_training")
    assert proof["compared"]["losses"] == 12
    assert "max_steps=12 instead of None" in proof["shortened"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["script_training-proof-001"], "no runs/mine"
    assert not (tmp_path / "after.txt").exists(), "the code after the training does not run"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        pytest.param("with_hidden_state", "not restored      `_CALLS[0]` of ", marks=pytest.mark.slow),
        pytest.param("with_hidden_loop_state", "`carried` of with_hidden_loop_state()", marks=pytest.mark.slow),
        pytest.param("with_unseeded_data", "the data is not what the run was started with", marks=pytest.mark.slow),
    ],
)
def test_a_script_that_does_not_resume_exactly_is_caught(warm_whet: Run, function: str, words: str) -> None:
    done = warm_whet("prove", f"{SCRIPT}:{function}", *QUICK)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("broken")
    assert words in done.stdout
