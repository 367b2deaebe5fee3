"""`seeds=3`: several seeds in one folder, resume, mean and spread."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from whet.base.errors import UsageError
from whet.checkpoint import store
from whet.cli import main
from whet.cli.multi_run import parse_seeds
from whet.report.run_report import summarize
from whet.report.seeds import SeedsResult, check_same_data, metric_spread, render_seeds
from whet.run.folder import RECIPE_FILE, create_run, open_run

pytestmark = pytest.mark.torch

RECIPE = '''
import torch
from torch import nn
from whet.config.options import CommonConfig
from whet.plan.workload import Workload
from whet.recipes.recipe import Recipe


class Line(Recipe):
    """Two numbers to one; the noise of the data is the same whatever the seed."""

    name, Config, goal, mode = "line", CommonConfig, "closeness", "max"

    def describe(self, config, data=None):
        return Workload(recipe="line", num_parameters=3, global_batch_size=config.global_batch_size)

    def data(self, config):
        self.train = self.val = self.test = {
            "x": torch.linspace(-1, 1, 640).reshape(320, 2), "y": torch.sin(torch.arange(320.0))[:, None]
        }
        return self

    def model(self, config, data):
        return nn.Linear(2, 1)

    def loss(self, model, micro):
        return ((model(micro.x) - micro.y) ** 2).mean()

    def evaluate(self, model, micro_batches):
        closeness = -sum(float(self.loss(model, micro)) for micro in micro_batches)
        return {"closeness": closeness, "weight": model.weight[0, 0]}

    def metadata(self, config, data):
        return {}


def recipe():
    return Line()
'''


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "WHET_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "whet", "train", "line.py", "global_batch_size=4", "threads=1", "--device=cpu"]
    (folder / "line.py").write_text(RECIPE)
    return subprocess.Popen(
        [*command, "--no-measure", *words],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, errors = process.communicate(timeout=600)
    return process.returncode, out, errors


@pytest.mark.slow
def test_interrupted_seeds_resume_exactly(tmp_path: Path) -> None:
    words = ("epochs=4", "seeds=3", "seed=5", "--run", "all")
    process = start(tmp_path, *words)
    second = tmp_path / "all" / "seed-6"
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and not (second / "events.jsonl").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    code, _, errors = finish(process)
    assert code == 130, errors
    assert "1 of 3 seeds are done; to resume all:\n  whet train line.py" in errors
    assert errors.rstrip().endswith("epochs=4 seeds=3 seed=5 --device cpu --run all")
    stopped = json.loads((tmp_path / "all" / "seeds.json").read_text())
    assert (stopped["seeds"], stopped["done"]) == ([5, 6, 7], [5])
    code, out, errors = finish(start(tmp_path, *words))
    assert code == 0, errors
    assert "seeds     5, 6, 7 are done" in out
    assert "next      whet report all" in errors
    logged = json.loads((tmp_path / "all" / "seeds.json").read_text())
    assert logged["done"] == [5, 6, 7]
    metrics = {metric["name"]: metric for metric in logged["metrics"]}
    weights = [summarize(tmp_path / "all" / f"seed-{seed}").metrics["test_weight"] for seed in (5, 6, 7)]
    assert len({*weights}) == 3
    assert metrics["test_weight"]["values"] == weights
    assert metrics["test_weight"]["mean"] == pytest.approx(statistics.mean(weights))
    assert metrics["test_weight"]["deviation"] == pytest.approx(statistics.stdev(weights))
    assert "best closeness on val" in metrics


def tensors(run: Path) -> dict[str, torch.Tensor]:
    result = store.load_newest(open_run(run).checkpoints)
    assert result is not None
    return {**result[1].tensors, "step": torch.tensor(result[0])}


def test_two_epochs_per_session_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "line.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "home"))
    for name in ("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO"):
        monkeypatch.setenv(name, "1.0")  # A training sets them for its own process, which is this one.

    def train(*words: str) -> tuple[str, str]:
        options = ("global_batch_size=16", "threads=1", "--no-measure", "--max-restarts=0", "--device=cpu")
        assert main.run(["train", "line.py", "epochs=4", *words, *options]) == 0
        return capfd.readouterr()

    for session in range(3):
        out, errors = train("seeds=2", "seed=5", "epochs_per_session=2", "--run", "sat")
        # The first run ends in the second session, in which the next one starts.
        done = ["0 of 2", "1 of 2", ""][session]
        assert (f"{done} seeds are done; to resume all:\n  whet train line.py epochs=4 seeds=2" in errors) == bool(done)
        assert "seeds     5, 6 are done" in out or done
        if session == 0:
            assert "epochs_per_session=2; saved at step" in errors
            assert summarize(tmp_path / "sat" / "seed-5").step == 40
    assert [len(summarize(tmp_path / "sat" / f"seed-{seed}").sessions) for seed in (5, 6)] == [2, 2]
    train("seed=6", "--run", "whole")
    ours, theirs = tensors(tmp_path / "sat" / "seed-6"), tensors(tmp_path / "whole")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    assert not torch.equal(tensors(tmp_path / "sat" / "seed-5")["model/weight"], theirs["model/weight"])

    assert main.run(["report", "sat"]) == 0
    assert "seeds     5, 6 are done" in capfd.readouterr().out
    logged = json.loads((tmp_path / "sat" / "seeds.json").read_text())
    (metric,) = [metric for metric in logged["metrics"] if metric["name"] == "test_weight"]
    weights = [summarize(tmp_path / "sat" / f"seed-{seed}").metrics["test_weight"] for seed in (5, 6)]
    assert metric["values"] == weights
    assert metric["mean"] == pytest.approx(sum(weights) / 2)
    assert main.run(["train", "line.py", "seeds=2", "--run", "whole"]) == 2
    assert "is a single run" in capfd.readouterr().err


def test_seeds_of_different_data_have_no_mean(tmp_path: Path) -> None:
    for seed, data in enumerate(("one", "one", "other")):
        path = tmp_path / f"seed-{seed}"
        create_run(path, recipe="text", config={}, plan={}, machine={}, versions={}, command=["whet"])
        (path / RECIPE_FILE).write_text(json.dumps({"data": data}))
    check_same_data(tmp_path, (0, 1))
    check_same_data(tmp_path, ())
    with pytest.raises(UsageError, match="different data"):
        check_same_data(tmp_path, (0, 1, 2))


def test_invalid_seeds_are_reported_by_the_training() -> None:
    assert parse_seeds(("seeds=3", "seed=5"), None) == range(5, 8)
    for words in (("seeds=0",), ("seeds=10001",), ("seeds=3", "seed=-3"), ("seeds=true",)):
        assert len(parse_seeds(words, None)) == 1


def test_interval_is_students_t() -> None:
    # Known from tables: the half width for n values of deviation 1 is t / sqrt(n).
    two, three = metric_spread("a", [0.0, 2**0.5]), metric_spread("a", [-1.0, 0.0, 1.0])
    assert two.high == pytest.approx(2**0.5 / 2 + 12.706 / 2**0.5)
    assert (three.low, three.high) == pytest.approx((-4.303 / 3**0.5, 4.303 / 3**0.5))
    many = metric_spread("a", [float(n % 2) for n in range(61)])
    assert many.deviation is not None
    assert many.high - many.mean == pytest.approx(2.0003 * many.deviation / 61**0.5, rel=1e-3)
    assert metric_spread("a", [0.5]).deviation is None
    assert metric_spread("a", [0.5, float("nan")]).low is None


def test_interval_of_a_share_is_within_0_and_1() -> None:
    metrics = (metric_spread("test_accuracy", [0.7, 0.8, 0.9]), metric_spread("test_brier", [0.0, 0.1, 0.6]))
    shown = "\n".join(render_seeds(SeedsResult(recipe="text", seeds=(1, 2, 3), done=(1, 2, 3), metrics=metrics)))
    assert "0.5516 to 1.0000" in shown
    assert "-0.5653 to 1.0319" in shown
