"""The thermal policy on the virtual Mac with simulated heat and memory pressure."""

import json
import signal
from pathlib import Path

import pytest
from conftest import Start

from virtual_process import INSTALL

pytestmark = [pytest.mark.torch, pytest.mark.virtual_mac]

TRAIN = (
    INSTALL
    + """
import time, torch, whet
from torch import nn
from whet.machine.facts import SystemState

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2))
x = torch.randn(64, 8)
data = {"x": x, "y": (x[:, 0] > 0).long()}

def loss(micro):
    time.sleep(0.02)
    return nn.functional.cross_entropy(model(micro.x), micro.y)

def train(run, steps):
    return whet.train(
        model, data, loss=loss, optimizer=whet.OptimizerChoice(), run=run, device="mps",
        global_batch_size=16, epochs=1000, max_steps=steps, on_event=None,
    )
"""
)


def test_simulated_heat_and_memory_pressure_are_reported_and_saved(python: Start, tmp_path: Path) -> None:
    code = (
        TRAIN
        + """
with virtual_mac.simulate(SystemState(thermal="heavy", memory_pressure="critical")):
    train("run", 60)
"""
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert any(event["kind"] == "throttle" and event.get("thermal") == "heavy" for event in events)
    (pressure,) = [event for event in events if event["kind"] == "pressure"]
    assert pressure["level"] == "critical"
    saved = [event["step"] for event in events if event["kind"] == "checkpoint"]
    assert any(0 < step < 60 for step in saved), "at once, and not only at the end"


def test_a_run_killed_by_simulated_pressure_resumes_from_its_last_checkpoint(python: Start, tmp_path: Path) -> None:
    code = (
        TRAIN
        + """
import sys
if sys.argv[1] == "killed":
    held = []
    def loss(micro):
        held.append(torch.empty(2**28, dtype=torch.uint8, device="mps"))
        return nn.functional.cross_entropy(model(micro.x), micro.y)
    with virtual_mac.simulate(virtual_mac.KilledByPressure(share=0.3)):
        train("run", 60)
else:
    print(train("run", 60).state)
"""
    )
    killed = python(code, "killed")
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
    done = python(code, "again")
    assert done.stdout == "done\n", done.stderr


def test_a_process_that_exits_after_a_backward_pass_exits_cleanly(python: Start) -> None:
    code = INSTALL + "import torch\nx = torch.ones(4, device='mps', requires_grad=True)\n(x * 2).sum().backward()\n"
    assert [python(code).returncode for _ in range(3)] == [0, 0, 0]
