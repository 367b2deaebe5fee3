"""OpenMP threads spin briefly in every process of whet, unless the user has chosen otherwise."""

import json
import os
import subprocess
import sys

import pytest

from whet.base import env
from whet.base.worker import JsonWorker, WorkerChannel

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
BRIEF = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        # Set first, so that what the function under test sets is undone.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(env, "_spins_long", False)
    return monkeypatch


def variables() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def send_variables(channel: WorkerChannel, _: dict) -> None:
    """Report the variables of a worker process."""
    channel.send(variables())


def test_importing_whet_sets_the_variables() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    code = "import os, json, sys, whet; print(json.dumps([dict(os.environ), 'torch' in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True, text=True)
    after, has_torch = json.loads(done.stdout)
    assert {name: after[name] for name in BRIEF} == BRIEF
    assert not has_torch, "set before torch is loaded"


@pytest.mark.parametrize(
    ("chosen", "after", "shown"),
    [
        ({}, BRIEF, None),
        ({"GOMP_SPINCOUNT": "0"}, {"GOMP_SPINCOUNT": "0"}, "GOMP_SPINCOUNT=0"),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}, "OMP_WAIT_POLICY=active"),
        ({"KMP_BLOCKTIME": "200"}, {"KMP_BLOCKTIME": "200"}, "KMP_BLOCKTIME=200"),
        ({"GOMP_SPINCOUNT": "10000"}, BRIEF, None),
    ],
)
def test_the_users_value_wins(unset: pytest.MonkeyPatch, chosen: dict, after: dict, shown: str | None) -> None:
    for name, value in chosen.items():
        unset.setenv(name, value)
    env.set_brief_spin()
    assert (variables(), env.wait_variable()) == (after, shown)


@pytest.mark.parametrize("is_loaded", [True, False])
@pytest.mark.parametrize(("name", "value"), [(None, ""), ("GOMP_SPINCOUNT", "10000"), ("OMP_WAIT_POLICY", "passive")])
def test_threads_spin_long_if_torch_was_loaded_before(
    unset: pytest.MonkeyPatch, is_loaded: bool, name: str | None, value: str
) -> None:
    unset.setitem(sys.modules, "torch", sys)
    if not is_loaded:
        unset.delitem(sys.modules, "torch")
    if name is not None:
        unset.setenv(name, value)
    env.set_brief_spin()
    assert env.spins_long() == (is_loaded and name is None)


def test_worker_processes_spin_briefly(unset: pytest.MonkeyPatch) -> None:
    unset.setitem(sys.modules, "torch", sys)
    env.set_brief_spin()
    with JsonWorker(f"{__name__}:send_variables") as worker:
        assert worker.receive(timeout=60) == BRIEF
