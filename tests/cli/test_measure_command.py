"""`whet plan --measure` and `whet train` as a user runs them: real processes measure, with a small budget."""

import json
from pathlib import Path

import pytest

from paths import Run

pytestmark = pytest.mark.torch

RECIPE = """
import os, torch
from torch import nn
from whet.config.options import CommonConfig
from whet.plan.workload import Workload
from whet.recipes.recipe import Recipe

class Config(CommonConfig):
    epochs: int = 400
    bad: str = ""

class Data:
    def __init__(self):
        drawn = torch.Generator().manual_seed(0)
        x = torch.randn(320, 16, generator=drawn)
        self.train = self.val = self.test = (x, x.sum(1, keepdim=True))

class Tiny(Recipe):
    name, goal, Config = "tiny", "score", Config
    def describe(self, config, data=None):
        return Workload(recipe="tiny", num_parameters=1, global_batch_size=config.global_batch_size, num_samples=320,
                        num_steps=config.epochs * 10)
    def data(self, config):
        return Data()
    def model(self, config, data):
        self.bad = config.bad
        return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    def loss(self, model, micro):
        if self.bad == "threads" and torch.get_num_threads() == 1:
            os.abort()
        return (model(micro.x) - micro.y).square().mean()
    def evaluate(self, model, micro_batches):
        return {"score": 0.0}
    def metadata(self, config, data):
        return {}

def recipe():
    return Tiny()
"""
DECIDED = ("precision=fp32", "micro_batch=32", "compile=off")
"""Settings that are fixed are not tried, so few trials remain."""


@pytest.mark.slow
def test_measured_plan_as_json_has_its_trials(warm_whet: Run, tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(RECIPE)
    done = warm_whet("plan", "tiny.py", "threads=1", *DECIDED, "--measure", "--budget", "60", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["trials"]
    assert {setting["source"] for setting in plan["settings"].values()} >= {"rule", "measured"}
    assert "measuring real steps in a separate process, at most 60 s" in done.stderr
    assert " trial" in done.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "tiny.py"] or not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_killed_probe_is_reported_and_the_others_continue(warm_whet: Run, tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(RECIPE)
    done = warm_whet("plan", "tiny.py", "bad=threads", *DECIDED, "--measure", "--budget", "60", "--json")
    assert done.returncode == 0, done.stderr
    trials = {trial["setting"]: trial for trial in json.loads(done.stdout)["trials"]}
    assert trials["threads"]["verdict"] == "failed"
    assert "SIGABRT" in trials["threads"]["note"]
    assert len(trials) > 1


def test_invalid_measurements_are_refused(warm_whet: Run, tmp_path: Path) -> None:
    refusals = {
        ("plan", "text", "--measure", "--machine", "m2-air-8gb"): "only this machine can be measured",
        ("plan", "text", "--measure", "--budget", "0"): "",
        ("plan", "text", "--measure", "data=missing.csv"): "missing.csv",
        ("plan", "text", "global_batch_size=auto"): "has to be measured",
        ("plan", "text", "global_batch_size=auto", "--machine", "h200"): "has to be measured",
        ("prove", "text", "global_batch_size=auto"): "has to be measured",
    }
    for words, reported in refusals.items():
        done = warm_whet(*words)
        assert done.returncode == 2, words
        assert reported in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_short_training_reports_that_it_is_not_measured(warm_whet: Run, tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(RECIPE)
    done = warm_whet("train", "tiny.py", "epochs=11", "--run", "run")
    assert done.returncode == 0, done.stderr
    assert ", too short to measure which settings are fastest" in " ".join(done.stderr.split())
    quiet = warm_whet("train", "tiny.py", "epochs=11", "--run", "other", "--no-measure")
    assert quiet.returncode == 0, quiet.stderr
    assert "not measured" not in quiet.stderr


def test_auto_batch_size_is_measured_once_by_the_command(warm_whet: Run, tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(RECIPE)
    session = ("epochs=2", "epochs_per_session=1", "--run", "run", "--max-restarts=0")
    words = ("train", "tiny.py", "global_batch_size=auto", *session)
    refused = warm_whet(*words, "--no-measure")
    assert refused.returncode == 2
    assert "global_batch_size=auto has to be measured\n  got: --no-measure" in refused.stderr
    assert not (tmp_path / "run").exists()

    first = warm_whet(*words)
    assert first.returncode == 0, first.stderr
    assert "finding a global batch size for this machine" in first.stderr
    assert "tiny.py  measuring: global batch " in first.stderr
    config = json.loads((tmp_path / "run/config.json").read_text())
    chosen = json.loads((tmp_path / "run/plan.json").read_text())["workload"]["batch"]
    assert (config["global_batch_size"], config["lr"]) == (chosen["batch"], chosen["rates"][0])
    assert chosen["batch"] in (8, 16)
    assert len(chosen["points"]) == 2

    again = warm_whet("--quiet", *words, "--no-measure")
    assert again.returncode == 0, again.stderr
    assert "measuring" not in again.stderr
    assert "all 2 epochs done" in again.stdout
    assert json.loads((tmp_path / "run/config.json").read_text())["lr"] == config["lr"]
    assert "was made with a different lr" in warm_whet(*words, "lr=1").stderr


@pytest.mark.slow
def test_quiet_measurement_prints_nothing(warm_whet: Run, tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(RECIPE)
    done = warm_whet("--quiet", "plan", "tiny.py", "global_batch_size=auto", "--measure", "--budget", "4", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout)["workload"]["batch"]["points"]
