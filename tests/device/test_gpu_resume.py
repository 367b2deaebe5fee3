"""On a real GPU: a killed training resumes bit for bit, and a run moves to the CPU and back."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from whet.checkpoint import store
from whet.device import virtual_mac
from whet.device.open import UNAVAILABLE_REASONS
from whet.report.run_report import summarize
from whet.run.events import read_events
from whet.run.folder import open_run

pytestmark = pytest.mark.torch

SMALL = ("arch.hidden_size=64", "arch.layers=2", "arch.max_length=24", "arch.vocab_size=600", "threads=1")


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.gpu(kind)) for kind in ("cuda", "mps")])
def gpu(request: pytest.FixtureRequest) -> str:
    reason = UNAVAILABLE_REASONS[request.param]()
    if reason is not None or virtual_mac.installed():
        pytest.skip(f"no {request.param} here: {reason or 'a virtual one lives in one process only'}")
    return str(request.param)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    rows = [{"text": f"{'ab'[n % 2]} {'word ' * (n % 5)}{n % 7} {n}", "label": "ab"[n % 2]} for n in range(4_000)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "whet", "train", "text", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return errors


def tensors(run: Path) -> dict[str, torch.Tensor]:
    result = store.load_newest(open_run(run).checkpoints)
    assert result is not None
    return result[1].tensors


def losses(run: Path) -> list[float | None]:
    return [event.number("loss") for event in read_events(open_run(run), kinds=("step",))]


def test_killed_three_times_it_ends_bit_for_bit_the_same(gpu: str, table: Path, tmp_path: Path) -> None:
    keys = (
        f"data={table}",
        "epochs=3",
        "global_batch_size=8",
        "checkpoint_steps=50",
        "dropout=0.2",
        "deterministic=on",
    )
    words = (*keys, *SMALL, "--device", gpu)
    finish(start(*words, "--run", str(tmp_path / "whole"), "--max-restarts", "0"))
    cut = tmp_path / "cut"
    process = start(*words, "--run", str(cut))
    for step in (150, 400, 700):
        deadline = time.monotonic() + 120
        while not ((cut / "checkpoints").exists() and max(store.list_steps(cut / "checkpoints"), default=0) >= step):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.005)
        psutil.Process(process.pid).children()[0].kill()
    assert finish(process).count("was killed by SIGKILL; it resumes with the same plan") == 3
    ours, theirs = tensors(cut), tensors(tmp_path / "whole")
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in theirs.items() if not torch.equal(tensor, ours[name])] == []
    losses = [
        [e.number("loss") for e in read_events(open_run(run), kinds=("step",))] for run in (cut, tmp_path / "whole")
    ]
    assert losses[0] == losses[1]
    report = summarize(cut)
    assert len(report.sessions) == 4
    assert report.inexact_since is None


def test_a_run_moves_to_the_cpu_and_back_and_its_first_batch_agrees(gpu: str, table: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = (f"data={table}", "epochs=3", "global_batch_size=8", "precision=fp32", *SMALL, "--run", str(run))
    for steps, device in (("max_steps=100", gpu), ("max_steps=200", "cpu"), ("max_steps=300", gpu)):
        finish(start(*words, steps, "--device", device))
    events = list(read_events(open_run(run), kinds=("plan",)))
    # The first session compares with the CPU too, unless the result of an earlier run is cached.
    (compared,) = [event for event in events if f"moved from cpu to {gpu}" in str(event.get("message"))]
    difference = compared.number("difference")
    assert difference is not None
    assert difference <= 1e-4
    assert summarize(run).inexact_since == 100
