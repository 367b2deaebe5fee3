"""`whet bench` with real short runs of a tiny recipe: files and bad input."""

import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from homes import new_home
from paths import ROOT, Run

pytestmark = pytest.mark.torch

TINY = """
import torch
from torch import nn
from whet.config.options import CommonConfig
from whet.plan.workload import Workload
from whet.recipes.recipe import Recipe

class Config(CommonConfig):
    width: int = 16

class Data:
    def __init__(self):
        x = torch.randn(256, 8)
        self.train = self.val = self.test = {"x": x, "y": (x.sum(1) > 0).long()}

class Tiny(Recipe):
    name = "tiny"
    Config = Config
    goal = "accuracy"

    def describe(self, config, data=None):
        return Workload(recipe="tiny", num_parameters=9 * config.width + (config.width + 1) * 2, num_samples=256,
            global_batch_size=config.global_batch_size, num_steps=100, activation_bytes=8 * config.width,
            sample_bytes=40)

    def data(self, config):
        return Data()

    def model(self, config, data):
        return nn.Sequential(nn.Linear(8, config.width), nn.Tanh(), nn.Linear(config.width, 2))

    def loss(self, model, micro):
        FAULT
        return nn.functional.cross_entropy(model(micro.x), micro.y)

    def evaluate(self, model, micro_batches):
        return {"accuracy": 0.0}

    def metadata(self, config, data):
        return {}

def recipe():
    return Tiny()
"""
WORDS = ("bench", "tiny.py", "global_batch_size=16", "threads=1", "precision=fp32")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return plant(tmp_path, "pass")


def plant(folder: Path, fault: str) -> Path:
    (folder / "tiny.py").write_text(TINY.replace("FAULT", fault))
    return folder


@pytest.mark.slow
def test_short_benchmark_writes_a_result_a_page_and_a_picture(whet: Run, tiny: Path) -> None:
    done = whet(*WORDS, "--against", "naive", "--sweep", "micro_batch", "--budget", "60", "--markdown")
    assert done.returncode == 0, done.stderr
    (page,) = (tiny / "bench").glob("*.md")
    result = json.loads(page.with_suffix(".json").read_text())
    against, sweep = result["sweeps"]
    assert [row["value"] for row in against["rows"]] == ["plain loop", "plan"]
    assert [row["value"] for row in sweep["rows"]] == [1, 2, 4, 8, 16]
    assert all(row["outcome"] == "measured" for row in sweep["rows"]), sweep
    assert result["spent_seconds"] <= 66
    # A micro-batch of one is far slower than the whole batch, even on a noisy machine.
    assert sweep["rows"][0]["speedup"]["high"] < 1
    assert "whet bench tiny.py global_batch_size=16" in page.read_text()
    assert f"]({page.stem}.svg)" in page.read_text()
    assert ET.parse(page.with_suffix(".svg")).getroot().tag.endswith("svg")
    assert "plain loop" in done.stdout


@pytest.mark.slow
def test_a_value_with_a_killed_process_is_a_row(whet: Run, tmp_path: Path) -> None:
    plant(tmp_path, "import os; len(micro.sample_ids) == 4 and os.kill(os.getpid(), 9)")
    done = whet(*WORDS, "--sweep", "micro_batch", "--budget", "90", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["value"]: row for row in json.loads(done.stdout)["sweeps"][0]["rows"]}
    assert rows[4]["outcome"] == "failed"
    assert "SIGKILL" in rows[4]["note"]
    assert rows[8]["speedup"] is not None
    assert not (tmp_path / "bench").exists()


@pytest.mark.slow
def test_global_batch_sizes_are_measured_for_a_model_from_python(whet: Run, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text((ROOT / "tests" / "support" / "script_training.py").read_text())
    sizes = ["--sweep", "global_batch_size=8,16", "--sweep", "micro_batch=4"]
    done = whet("bench", f"{script}:main", *sizes, "--budget", "60", "--json")
    assert done.returncode == 0, done.stderr
    batches, micro = json.loads(done.stdout)["sweeps"]
    assert [row["value"] for row in batches["rows"]] == [8, 16]
    assert all(row["samples_per_second"] and row["peak_bytes"] for row in batches["rows"]), batches
    assert 4 in [row["value"] for row in micro["rows"]]


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("text", "--against", "peers"), "--against naive"),
        (("text", "--sweep", "micro_bach"), "--sweep micro_batch"),
        (("text", "--out", "tiny.py"), "--out DIR"),
        (("text", "--budget", "1"), "bench --help"),
        (("text", "epohcs=3"), "epochs"),
        (("txt",), "text"),
    ],
)
def test_bad_input_gives_three_line_errors(warm_whet: Run, tiny: Path, words: tuple[str, ...], reported: str) -> None:
    done = warm_whet("bench", *words)
    lines = done.stderr.rstrip("\n").split("\n")
    errors = lines[-3:]
    assert done.returncode == 2, done.stderr
    assert errors[0].startswith("error: ")
    assert errors[1].startswith("  got: ")
    assert errors[2].startswith("  try: ")
    assert reported in done.stderr
    assert not (tiny / "bench").exists()


# `test_parent_of_a_benchmark_never_imports_torch` meets the same error.
@pytest.mark.slow
def test_setting_that_cannot_be_swept_is_an_early_error(whet: Run, tiny: Path) -> None:
    done = whet(*WORDS, "--sweep", "threads", "--budget", "60")
    assert done.returncode == 2
    assert "you set threads=1" in done.stderr


@pytest.mark.slow
def test_budget_too_small_to_start_is_an_error(whet: Run, tiny: Path) -> None:
    text = (tiny / "tiny.py").read_text()
    (tiny / "tiny.py").write_text(
        text.replace("def data(self, config):", "def data(self, config):\n        import time; time.sleep(30)")
    )
    start = time.monotonic()
    done = whet(*WORDS, "--budget", "5")
    assert done.returncode == 1
    assert "nothing could be measured" in done.stderr
    assert "--budget" in done.stderr
    assert time.monotonic() - start < 25, "the recipe's 30 seconds were waited for"


def test_parent_of_a_benchmark_never_imports_torch(tmp_path: Path) -> None:
    """`whet bench text` refuses its sweep only after its process has made a plan; until then torch is not imported."""
    words = ["bench", "text", "arch.layers=1", "threads=1", "--sweep", "threads", "--budget", "300"]
    code = f"import sys; from whet.cli import main; code = main.run({words}); print(code, 'torch' in sys.modules)"
    env = {**os.environ, "WHET_HOME": str(new_home(tmp_path / "whet-home"))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["2", "False"], done.stderr
    assert "you set threads=1" in done.stderr
