"""whet's MPS device on the virtual m2-air-8gb: trains, is interrupted, resumes bit for bit, moves to the CPU."""

import json
import signal
import time
from pathlib import Path

import pytest
import torch

import whet
from fork_server import TIMEOUT_SECONDS
from virtual_process import INSTALL, environment
from warm_python import Program, WarmPython
from whet.checkpoint import store
from whet.run.events import read_events
from whet.run.folder import open_run

pytestmark = [pytest.mark.torch, pytest.mark.virtual_mac]

SMALL = ("arch.hidden_size=32", "arch.layers=1", "arch.max_length=24", "arch.vocab_size=600", "threads=1")
WHET = "from whet.cli.main import main; main()"


class Cli:
    """`whet WORDS` in a process with a virtual Mac, or without."""

    def __init__(self, folder: Path, home: Path, python: WarmPython) -> None:
        self.folder, self.home, self.python = folder, home, python

    def start(self, *words: object, is_mac: bool = True, fault: str = "") -> Program:
        # A process with a virtual Mac has no supervisor, so the other one has none either.
        alone = () if is_mac or words[0] != "train" else ("--max-restarts", "0")
        code = (INSTALL if is_mac else "") + fault + WHET
        return self.python.start("-c", code, *words, *alone, cwd=self.folder, env=environment(self.home))

    def run(self, *words: object, is_mac: bool = True) -> str:
        done = self.start(*words, is_mac=is_mac).wait()
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def cli(tmp_path: Path, home: Path, _built: None, warm_python: WarmPython) -> Cli:
    return Cli(tmp_path, home, warm_python)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    words = {"animal": "fox", "plant": "fern", "stone": "flint"}
    rows = []
    for number in range(600):
        label = list(words)[number % 3]
        filler = " ".join(["the", "of", "and", "by"][(number * 7 + place * place) % 4] for place in range(number % 9))
        rows.append(json.dumps({"text": f"{filler} {words[label]}{number % 5} {number}", "label": label}))
    path.write_text("\n".join(rows))
    return path


def losses(run: Path) -> dict[int, float]:
    return {event.step: event.number("loss") for event in read_events(open_run(run), kinds=("step",))}


def newest(run: Path) -> dict[str, torch.Tensor]:
    result = store.load_newest(open_run(run).checkpoints)
    assert result is not None
    return result[1].tensors


def test_interrupted_with_dropout_it_ends_bit_for_bit_the_same(cli: Cli, table: Path) -> None:
    # Long epochs: at the end of one, a generator that is not restored could go unnoticed.
    keys = ("epochs=4", "global_batch_size=8", "lr=3e-3", "dropout=0.2", "seed=7")
    words = ("train", "text", f"data={table}", *keys, "--device", "mps", *SMALL)
    cli.run(*words, "--run", "whole")
    process = cli.start(*words, "--run", "cut")
    cut, whole = cli.folder / "cut", cli.folder / "whole"
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline and not ((cut / "events.jsonl").exists() and len(losses(cut)) > 70):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stopped = process.wait()
    assert stopped.returncode == 130, stopped.stderr
    assert 70 < max(losses(cut)) < max(losses(whole))
    out = cli.run(*words, "--run", "cut")
    assert "all 4 epochs done" in out
    assert len(list(read_events(open_run(cut), kinds=("start", "resume")))) == 2
    assert "mps" in cli.run("plan", "text", f"data={table}", *SMALL, "--machine", "m2-air-8gb")
    assert "done at step" in cli.run("report", "cut")
    assert losses(cut) == losses(whole)
    ours, theirs = newest(cut), newest(whole)
    assert ours["rng/mps"].shape == (44,)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    report = whet.summarize(cut)
    assert report.state == "done"
    assert report.metrics["test_accuracy"] > 0.9
    assert "m2-air-8gb (virtual)" in str(open_run(cut).plan)


def test_a_run_moves_from_the_virtual_mac_to_the_cpu_and_back(cli: Cli, table: Path) -> None:
    words = ("train", "text", f"data={table}", "epochs=6", "lr=3e-3", *SMALL, "--run", "moving")
    cli.run(*words, "max_steps=20", "--device", "mps")
    assert "rng/mps" in newest(cli.folder / "moving")
    cli.run(*words, "max_steps=40", "--device", "cpu", is_mac=False)
    assert "rng/mps" not in newest(cli.folder / "moving")
    cli.run(*words, "max_steps=60", "--device", "mps")
    assert max(losses(cli.folder / "moving")) == 60
    report = whet.summarize(cli.folder / "moving")
    assert report.inexact_since == 20
    assert "device" in (report.inexact_reason or "")


def test_after_a_move_the_first_batch_is_compared_with_the_cpu(cli: Cli, table: Path) -> None:
    words = ("train", "text", f"data={table}", "epochs=6", "lr=3e-3", *SMALL, "--run", "moved")
    cli.run(*words, "max_steps=20", "--device", "cpu", is_mac=False)
    cli.run(*words, "max_steps=30", "--device", "mps")
    reported = [str(event.get("message")) for event in read_events(open_run(cli.folder / "moved"), kinds=("plan",))]
    assert any(
        "moved from cpu to mps; verified: loss and 18 gradients agree with the CPU" in line for line in reported
    ), reported


def test_a_device_that_computes_something_else_simulated_is_refused_after_a_move(cli: Cli, table: Path) -> None:
    words = ("train", "text", f"data={table}", "epochs=6", "lr=3e-3", *SMALL, "--run", "wrong")
    cli.run(*words, "max_steps=20", "--device", "cpu", is_mac=False)
    wrong = 'virtual_mac.simulate(virtual_mac.Miscompute("addmm", relative_error=0.3))\n'
    done = cli.start(*words, "max_steps=30", "--device", "mps", fault=wrong).wait()
    assert done.returncode == 1
    assert "the model computes different results on this device" in done.stderr
    assert max(losses(cli.folder / "wrong")) == 20


OPTIMIZERS = """
import sys
import torch
import whet

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = getattr(torch.optim, sys.argv[1])(model.parameters(), lr=0.1)
data = torch.randn(16, 3), torch.randn(16, 1)
whet.train(
    model, data, loss=torch.nn.functional.mse_loss, optimizer=optimizer, global_batch_size=4, epochs=9,
    max_steps=int(sys.argv[2]), run=sys.argv[1], device="mps", measure=False, on_event=None,
)
"""


@pytest.mark.parametrize("name", ["ASGD", "Adagrad"])
def test_optimizers_with_other_kernels_or_steps_on_the_device_train_and_resume(name: str, cli: Cli) -> None:
    """MPS has no fused Adagrad, and ASGD keeps its step counts on the device."""
    for steps in (2, 4):
        code = INSTALL + OPTIMIZERS
        done = cli.python.start("-c", code, name, steps, cwd=cli.folder, env=environment(cli.home)).wait()
        assert done.returncode == 0, done.stderr
    (event,) = read_events(open_run(cli.folder / name), kinds=("resume",))
    assert event.fields["exactness"].startswith("exact state")
