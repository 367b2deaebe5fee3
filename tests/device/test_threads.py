"""The number of threads is set in torch only if it changes, because setting it is not free."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

import whet
from whet.device.cpu import preserve_num_threads, set_num_threads
from whet.device.open import current_machine
from whet.plan.plan import make_plan
from whet.step.optimizers import OptimizerChoice
from whet.training.step_bench import LocalStepBench
from whet.training.training_config import parse_training_config
from whet.training.workload import describe_workload

pytestmark = pytest.mark.torch


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the numbers of threads that are set in torch, and set them."""
    numbers: list[int] = []
    set_num_threads = torch.set_num_threads

    def note(number: int) -> None:
        numbers.append(number)
        set_num_threads(number)

    monkeypatch.setattr(torch, "set_num_threads", note)
    return numbers


def a_training():
    model = nn.Linear(3, 2)
    data = (torch.randn(16, 3), torch.randint(0, 2, (16,)))
    return model, data, lambda micro: functional.cross_entropy(model(micro.x), micro.y)


def test_only_a_changed_number_is_reported(logged: list[int]) -> None:
    set_num_threads(1)
    assert logged == []
    set_num_threads(2)
    assert torch.get_num_threads() == 2
    with preserve_num_threads():
        set_num_threads(2)
    assert logged == [2]
    with preserve_num_threads():
        set_num_threads(1)
    assert torch.get_num_threads() == 2
    assert logged == [2, 1, 2]


@pytest.mark.parametrize(("threads", "expected"), [(1, []), (2, [2])])
def test_a_training_reports_it_at_most_once(logged: list[int], threads: int, expected: list[int]) -> None:
    model, data, loss = a_training()
    whet.train(
        model,
        data,
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        global_batch_size=8,
        device="cpu",
        overrides={"threads": threads, "micro_batch": 8},
        on_event=None,
    )
    assert logged == expected


@pytest.mark.parametrize(("threads", "expected"), [(1, []), (2, [2])])
def test_measuring_reports_it_at_most_once(logged: list[int], threads: int, expected: list[int]) -> None:
    model, data, loss = a_training()
    training = parse_training_config({"global_batch_size": 8})
    machine, system_state = current_machine()
    workload = describe_workload(model, data, training, recipe="net")
    plan = make_plan(machine, workload, overrides={"device": "cpu", "threads": threads}, system_state=system_state)
    with LocalStepBench(model, OptimizerChoice(lr=0.1), data, training, loss=loss, plan=plan) as rig:
        for micro_batch in (8, 4):
            prepared = rig.prepare({"micro_batch": micro_batch}, seconds=30)
            assert min(prepared.step(number) for number in range(3)) > 0
            prepared.close()
        assert logged == expected
    assert torch.get_num_threads() == 1


SPINNING = """
import json, time
import torch
from whet.base import env
from whet.device.cpu import start_idle_threads

torch.set_num_threads(2)
numbers = torch.ones(1 << 18)

def cpu_seconds():
    before = time.process_time()
    for _ in range(20):
        numbers.add_(1)  # computed by both threads; then the second one waits for work
        time.sleep(0.01)
    return time.process_time() - before

cpu_seconds()
times = [cpu_seconds()]
idle = start_idle_threads()
time.sleep(0.2)
times.append(cpu_seconds())
idle.close()
times.append(cpu_seconds())
print(json.dumps([env.spins_long(), *times]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is torch's library on Linux")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2 if sys.platform == "linux" else True, reason="needs two cores")
def test_idle_threads_let_waiting_threads_sleep() -> None:
    variables = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    times = {}
    for first in ("import torch", "import whet"):
        command = [sys.executable, "-c", f"{first}\n{SPINNING}"]
        done = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
        times[first] = json.loads(done.stdout)
    is_long, before, idle, after = times["import torch"]
    # CPU time, which other processes do not change: the number of turns is fixed.
    assert is_long
    assert idle < 0.3 * min(before, after)
    assert not times["import whet"][0]
    assert times["import whet"][1] < 0.5 * min(before, after), "the variable is set before torch is loaded"
