"""Threads sleep while other programs use the cores, and the same bits are trained."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import whet
from whet.base import env
from whet.device import contention
from whet.device.contention import MAX_WAKE_SECONDS, READ_EVERY_SECONDS, ContentionWatch, watch_contention
from whet.machine.load import ThreadTimes
from whet.training.callbacks.basic import CoreContention

pytestmark = pytest.mark.torch


class FakeIdleThreads:
    def __init__(self, log: list[str]) -> None:
        self.log = log
        log.append("sleep")

    def close(self) -> None:
        self.log.append("spin")


class Reading:
    """A thread that waits for a core a share of a second between two readings, and is woken a thousand times in it."""

    def __init__(self, share: float | None) -> None:
        self.share, self.running, self.waiting, self.slices = share, 0.0, 0.0, 0

    def read_times(self, _: int = 0) -> ThreadTimes | None:
        if self.share is None:
            return None
        self.running += 1 - self.share
        self.waiting += self.share
        self.slices += 1000
        return ThreadTimes(self.running, self.waiting, self.slices)


def a_watch(reading: Reading) -> tuple[ContentionWatch, list[str]]:
    done: list[str] = []
    return ContentionWatch(start_idle=lambda: FakeIdleThreads(done), read_times=reading.read_times), done


def read(watch: ContentionWatch, times: int = 4) -> None:
    for _ in range(times):
        assert watch.read()


def test_threads_follow_contention() -> None:
    reading = Reading(0.0)
    watch, done = a_watch(reading)
    read(watch)
    assert (done, watch.was_contended) == ([], False)
    reading.share = 0.3
    read(watch)
    assert (done, watch.was_contended) == (["sleep"], True)
    reading.share = 0.0
    read(watch, 31)
    assert done == ["sleep", "spin"], "after a while they try whether they are alone"
    read(watch, 40)
    assert done == ["sleep", "spin"]
    reading.share = 0.3
    read(watch)
    watch.stop()
    watch.run()
    assert done == ["sleep", "spin", "sleep", "spin"], "the end of the watch ends the idle threads"


def test_threads_sleep_on_while_they_wait_for_cores_when_they_are_woken() -> None:
    reading = Reading(2e3 * MAX_WAKE_SECONDS)
    watch, done = a_watch(reading)
    read(watch, 2000)
    assert done == ["sleep"]
    reading.share = 0.5e3 * MAX_WAKE_SECONDS
    read(watch, 2)
    assert done == ["sleep", "spin"]


def test_threads_try_to_spin_ever_less_often() -> None:
    """Another program may share the cores without delaying a thread that wakes."""
    reading = Reading(0.3)
    watch, done = a_watch(reading)
    for _ in range(2000):
        reading.share = 0.0 if watch._idle else 0.3
        read(watch, 1)
    assert 12 <= len(done) <= 18, "after 30, 60, 120, 240 and then every 480 seconds"


def test_without_counters_nothing_changes() -> None:
    watch, done = a_watch(Reading(None))
    watch.run()
    assert done == []


def test_a_watch_without_libgomp_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for libgomp reads all memory maps, so it is looked for once."""
    monkeypatch.setattr(contention, "READ_EVERY_SECONDS", 0.0)
    reading, starts = Reading(0.3), []

    def start_none() -> None:
        assert not starts, "libgomp is looked for again"
        starts.append("sleep")

    watch = ContentionWatch(start_idle=start_none, read_times=reading.read_times)
    watch.run()
    assert (starts, watch.was_contended) == (["sleep"], False)


def test_a_watch_inside_another_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    with watch_contention() as outer, watch_contention() as inner:
        assert inner is outer
    assert contention._active is None


def reported(monkeypatch: pytest.MonkeyPatch, *, kind: str = "cpu", threads: int = 2, spins_long: bool = True):
    """Return what a callback reports in three steps beside other programs."""
    monkeypatch.setattr(env, "_spins_long", spins_long)
    watch = SimpleNamespace(was_contended=False)
    monkeypatch.setattr(contention, "_active", watch)
    messages: list[str] = []
    run = SimpleNamespace(
        device=SimpleNamespace(is_cpu=kind == "cpu"),
        plan=SimpleNamespace(threads=threads),
        log=SimpleNamespace(event=lambda kind, **fields: messages.append(fields["message"])),
        exit_stack=SimpleNamespace(enter_context=lambda context: context.__enter__()),
    )
    callback = CoreContention()
    callback.on_start(run)
    for step in range(3):
        callback.after_step(SimpleNamespace(step=step), SimpleNamespace())
        watch.was_contended = True
    return messages


def test_what_to_export_is_said_once_where_torch_was_loaded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    (message,) = reported(monkeypatch)
    assert env.brief_spin_export() in message
    assert reported(monkeypatch, spins_long=False) == []


@pytest.mark.parametrize("changes", [{"kind": "cuda"}, {"threads": 1}])
def test_nothing_is_watched_where_nothing_can_change(monkeypatch: pytest.MonkeyPatch, changes: dict) -> None:
    assert reported(monkeypatch, **changes) == []


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
    done = []

    def start():
        from whet.device.cpu import start_idle_threads

        done.append("sleep")
        return start_idle_threads()

    reading = Reading(0.5)
    watch = ContentionWatch(start_idle=start, read_times=reading.read_times)
    monkeypatch.setattr(contention, "ContentionWatch", lambda: watch)
    monkeypatch.setattr(contention, "READ_EVERY_SECONDS", READ_EVERY_SECONDS / 1000)
    shared = train_a_net()
    assert done
    assert all(torch.equal(*pair) for pair in zip(alone, shared, strict=True))
