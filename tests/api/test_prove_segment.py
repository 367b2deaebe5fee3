"""The processes that `whet prove` starts and kills."""

import json
from pathlib import Path

import pytest

from paths import SUPPORT
from warm_python import WarmPython
from whet.api.prove import training_from_args

pytestmark = pytest.mark.torch

RECIPE = str(SUPPORT / "provable_recipe.py")
PROGRAM = """
import json, os, sys
from pathlib import Path
from whet.api.prove import train_segment
from whet.recipes import runner

os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
runner.train_recipe = lambda *_, **__: print(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
train_segment(Path("run"), {**json.loads(sys.argv[1]), "steps": 4, "every": 2}, on_event=None)
"""


@pytest.mark.parametrize(("setting", "workspace"), [("on", ":4096:8"), ("off", "None")])
def test_a_deterministic_training_starts_as_with_whet_train(
    setting: str, workspace: str, tmp_path: Path, warm_python: WarmPython
) -> None:
    """torch refuses matrix products on a CUDA device in deterministic mode unless cuBLAS has this variable."""
    _, training = training_from_args(RECIPE, (f"deterministic={setting}",), file=None, device="cpu")
    done = warm_python.run("-c", PROGRAM, json.dumps(training.arguments), cwd=tmp_path)
    assert done.stdout == f"{workspace}\n", done.stderr
