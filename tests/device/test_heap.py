"""Freed memory of CPU steps is kept for the next step: real processes, page faults counted by the kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import whet
from whet.plan.plan import Plan

pytestmark = pytest.mark.torch

JOB = """
import json, resource, statistics, sys
import psutil, torch, whet
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 64, 1), nn.ReLU(), nn.Conv2d(64, 16, 1))
data = torch.randn(96, 1, 144, 144), torch.randn(96, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
overrides = {"threads": 1, "micro_batch": 8, "freed_memory": None if sys.argv[1] == "auto" else sys.argv[1]}
loss = lambda micro: nn.functional.mse_loss(model(micro.x).mean((2, 3)), micro.y)
faults = []
with whet.Session(model, optimizer, data, global_batch_size=8, epochs=2, device="cpu", overrides=overrides) as session:
    for batch in session:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        session.step(loss, batch)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    inside = psutil.Process().memory_info().rss
weights = [round(float(p.detach().double().sum()), 12) for p in model.parameters()]
print(json.dumps({
    # The heap has the size it needs after some steps.
    "faults": statistics.median(faults[-12:]), "weights": weights,
    "returned_mb": (inside - psutil.Process().memory_info().rss) / 1e6,
}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has an option to keep freed memory")
def test_kept_memory_is_not_faulted_in_again_and_is_returned_in_the_end() -> None:
    def train(freed: str, **environment: str) -> dict[str, float]:
        made = subprocess.run(
            [sys.executable, "-c", JOB, freed],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return dict(json.loads(made.stdout.splitlines()[-1]))

    returned, kept = train("returned"), train("kept")
    logged = train("auto", MALLOC_TRIM_THRESHOLD_="131072")
    print(f"faults of pages in a step: {returned['faults']:.0f} returned, {kept['faults']:.0f} kept")
    assert kept["faults"] < 0.1 * returned["faults"]
    assert kept["weights"] == returned["weights"] == logged["weights"]
    assert kept["returned_mb"] > 10
    # Settings of the user for the C library are respected.
    assert logged["faults"] > 0.5 * returned["faults"]


SEVERAL = """
import json, multiprocessing
import psutil, torch
from whet.device.cpu import CpuDevice
from whet.device.cpu import keep_freed_memory

torch.set_num_threads(1)  # a forked process has no others

def kept_mb(size):
    # Each is larger than what is free by then, so that the C library has to ask the system for it.
    before = psutil.Process().memory_info().rss
    torch.ones(size << 18)
    return round((psutil.Process().memory_info().rss - before) / 2**20)

def work(queue):
    queue.put(kept_mb(120))

with keep_freed_memory():
    with keep_freed_memory():
        found = {"inner": kept_mb(40)}
    found["outer"] = kept_mb(80)
    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()
    worker = fork.Process(target=work, args=(queue,))
    worker.start()
    found["in a worker"] = queue.get()
    worker.join()
    found["beside a worker"] = kept_mb(160)
    # As when memory runs out.
    before = psutil.Process().memory_info().rss
    CpuDevice().memory.empty_cache()
    found["returned when asked"] = round((before - psutil.Process().memory_info().rss) / 2**20)
try:
    with keep_freed_memory():
        raise KeyError
except KeyError:
    found["after an error"] = kept_mb(200)
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has an option to keep freed memory")
def test_kept_until_the_last_session_is_over_never_in_workers_and_never_against_tunables() -> None:
    def keeping(**environment: str) -> set[str]:
        made = subprocess.run(
            [sys.executable, "-c", SEVERAL],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        print(made.stdout)
        return {where for where, megabytes in json.loads(made.stdout.splitlines()[-1]).items() if megabytes > 32}

    assert keeping() == {"inner", "outer", "beside a worker", "returned when asked"}
    assert keeping(GLIBC_TUNABLES="glibc.malloc.mmap_threshold=131072") == set()


def test_the_setting_may_change_when_a_run_resumes(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def train(**overrides: str | int) -> Plan:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.ones(12, 3), torch.ones(12, 1)
        overrides = {"threads": 1, **overrides}
        with whet.Session(
            model, optimizer, data, global_batch_size=4, device="cpu", run=folder, overrides=overrides
        ) as session:
            session.step(lambda micro: (model(micro.x) - micro.y).square().mean(), next(iter(session)))
        return session.plan

    assert train().freed_memory == train().freed_memory
    assert train(freed_memory="returned").freed_memory == "returned"
