"""Threads sleep while other programs use the cores, and the same bits are trained."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import whet
from whet.base import env
from whet.machine.load import ThreadTimes
from whet.training import setup
from whet.training.callbacks.contention import CoreContention

pytestmark = pytest.mark.torch


class FakeIdleThreads:
    def __init__(self, log: list[str]) -> None:
        self.log = log
        log.append("sleep")

    def close(self) -> None:
        self.log.append("spin")


class Reading:
    """A thread that waits for a core a share of the time, and is read once a second."""

    def __init__(self, share: float | None) -> None:
        self.share, self.running, self.waiting = share, 0.0, 0.0

    def read_times(self, _: int) -> ThreadTimes | None:
        if self.share is None:
            return None
        self.running += 1 - self.share
        self.waiting += self.share
        return ThreadTimes(self.running, self.waiting)


def watch(
    monkeypatch: pytest.MonkeyPatch,
    reading: Reading,
    *,
    kind: str = "cpu",
    threads: int = 2,
    spins_long: bool = True,
    spin_count: str = "10000",
):
    """Return a started callback, what it did, its messages and what ends it."""
    monkeypatch.setattr(env, "_spins_long", spins_long)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", spin_count)
    done: list[str] = []
    messages: list[str] = []
    ends: list = []
    run = SimpleNamespace(
        device=SimpleNamespace(kind=kind),
        plan=SimpleNamespace(threads=threads),
        log=SimpleNamespace(event=lambda kind, **fields: messages.append(fields["message"])),
        exit_stack=SimpleNamespace(callback=ends.append),
    )
    contention = CoreContention(
        start_idle=lambda: FakeIdleThreads(done),
        read_times=reading.read_times,
    )
    contention.on_start(run)
    return contention, done, messages, ends


def steps(contention: CoreContention, count: int = 4) -> None:
    for step in range(count):
        contention.after_step(SimpleNamespace(step=step), SimpleNamespace())


def test_threads_follow_contention(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(0.0)
    contention, done, messages, ends = watch(monkeypatch, reading)
    steps(contention)
    assert done == []
    reading.share = 0.3
    steps(contention)
    assert done == ["sleep"]
    reading.share = 0.0
    steps(contention, 31)
    assert done == ["sleep", "spin"], "after a while they try whether they are alone"
    steps(contention, 40)
    assert done == ["sleep", "spin"]
    reading.share = 0.3
    steps(contention)
    for end in ends:
        end()
    assert done == ["sleep", "spin", "sleep", "spin"], "the end of the run ends the idle threads"
    assert len(messages) == 1
    assert env.brief_spin_export() in messages[0]


def test_threads_try_to_spin_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    contention, done, _, _ = watch(monkeypatch, Reading(0.3))
    steps(contention, 2000)
    assert 12 <= len(done) <= 18, "after 30, 60, 120, 240 and then every 480 seconds"


@pytest.mark.parametrize("changes", [{"kind": "cuda"}, {"threads": 1}, {"spin_count": "300000"}])
def test_nothing_is_watched_where_nothing_can_change(monkeypatch: pytest.MonkeyPatch, changes: dict) -> None:
    contention, done, _, _ = watch(monkeypatch, Reading(0.5), **changes)
    steps(contention)
    assert done == []


def test_what_to_export_is_said_only_where_torch_was_loaded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    contention, done, messages, _ = watch(monkeypatch, Reading(0.5), spins_long=False)
    steps(contention)
    assert (done, messages) == (["sleep"], [])


def test_without_counters_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    contention, done, _, _ = watch(monkeypatch, Reading(None))
    steps(contention)
    assert done == []


def train_a_net(*, threads: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 1))
    data = (torch.randn(512, 256), torch.randn(512, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    overrides = {"threads": threads, "micro_batch": 64}
    whet.train(net, data, loss=nn.MSELoss(), optimizer=optimizer, global_batch_size=64, device="cpu", epochs=2,
               measure=False, on_event=None, overrides=overrides)  # fmt: skip
    return [parameter.detach().clone() for parameter in net.parameters()]


def test_a_training_beside_others_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "300000")
    alone = train_a_net()
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    reading, done = Reading(0.5), []

    def start() -> FakeIdleThreads | None:
        from whet.device.cpu import start_idle_threads

        done.append("sleep")
        return start_idle_threads()

    watching = CoreContention(start_idle=start, read_times=reading.read_times)
    watching.every_seconds = 0.0
    monkeypatch.setattr(setup, "CoreContention", lambda: watching)
    shared = train_a_net()
    assert done
    assert all(torch.equal(*pair) for pair in zip(alone, shared, strict=True))
