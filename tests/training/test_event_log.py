"""Values that a run logs besides its losses: health, gradient norms, confusion matrices and samples."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import whet
from fake_device import FakeDevice, FakeReader
from small_models import convnet, images
from whet.base.errors import UsageError
from whet.device.cpu import CpuDevice
from whet.machine.facts import SystemState
from whet.machine.load import ProcessUsage, Usage
from whet.run.curve import downsample_curves
from whet.run.event import Event
from whet.run.events import read_events
from whet.step.step import NORM_EVERY, Outcome
from whet.training import metrics
from whet.training.callbacks import health
from whet.training.callbacks.event_log import Recorder
from whet.training.progress import State

pytestmark = pytest.mark.torch


def cross_entropy(model: nn.Module):
    return lambda micro: nn.functional.cross_entropy(model(micro.x), micro.y)


def train(run: Path, *, seed: int = 0, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = convnet()
    options = {"global_batch_size": 8, "epochs": 1, "on_event": None, "overrides": {"threads": 1}, **options}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = whet.train(model, images(160, seed=0), loss=cross_entropy(model), optimizer=optimizer, run=run, **options)
    return model, result


def events(run: Path, kind: str) -> list[Event]:
    return list(read_events(run, kinds=(kind,)))


SEEN = SystemState(
    memory_available_bytes=3_000, swap_used_bytes=7, thermal="moderate", memory_pressure="warn", gpu_busy_percent=37.0
)


def test_health_is_written_between_steps_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The readings of the machine are simulated; those of the process are real."""
    monkeypatch.setattr("whet.training.callback.MAX_FIRST_SECONDS", 1e9)
    monkeypatch.setattr(health.Health, "every_seconds", 1e9)
    without, _ = train(tmp_path / "without", read_sensors=lambda: SEEN)
    assert events(tmp_path / "without", "health") == []
    monkeypatch.setattr(health.Health, "every_seconds", 0.0)
    with_health, _ = train(tmp_path / "with", read_sensors=lambda: SEEN)
    pairs = zip(without.state_dict().values(), with_health.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)

    actual = events(tmp_path / "with", "health")
    assert [event.step for event in actual] == list(range(1, 21))
    assert [event.get("samples") for event in actual] == [8 * event.step for event in actual]
    first, last = actual[0], actual[-1]
    assert "samples_per_second" not in first.fields, "there is nothing to compare the first with"
    assert 0 < last.number("samples_per_second") < 1e7
    memory = last.get("memory")
    assert 10**7 < memory["process"] < 10**11
    assert memory["process"] <= memory["peak"] * 1.01 < memory["limit"]
    assert (memory["available"], memory["swap"]) == (3_000, 7)
    assert memory["used"] > 10**8
    assert last.get("utilization")["gpu"] == 37.0
    assert {"cpu", "process"} <= last.get("utilization").keys()
    assert (last.get("thermal"), last.get("pressure"), last.get("heat")) == ("moderate", "warn", "cool")
    order = [(event.kind, event.step) for event in read_events(tmp_path / "with")]
    assert all(order.index(("health", step)) > order.index(("step", step)) for step in range(1, 21))

    curves = downsample_curves(tmp_path / "with", points=100)
    assert [p.mean for p in curves["health/memory/available"].points] == [3_000.0] * 20
    assert [p.samples for p in curves["health/utilization/gpu"].points] == [8 * step for step in range(1, 21)]


OUTCOME = Outcome(loss=torch.tensor(1.0), grad_norm=None, marks=())


def test_speed_excludes_pauses() -> None:
    """On a simulated clock: an evaluation of 4 s between two readings does not count as slow training."""
    now, logged = 100.0, []
    recorder = Recorder(None, FakeDevice(), on_event=lambda kind, fields: logged.append((kind, fields)))
    thermal: Any = SimpleNamespace(system_state=SystemState(), heat="hot")
    healths = health.Health(recorder, FakeDevice(), thermal, memory_bytes=None, clock=lambda: now, usage=Usage)
    for second in (1, 6, 11):
        now = 100.0 + second
        if second == 11:
            recorder.add_seconds("evaluate", 4.0)
        healths.after_step(State(step=second, samples=10 * second), OUTCOME)
    recorder.read()
    assert [(kind, fields["step"]) for kind, fields in logged] == [("health", 1), ("health", 6), ("health", 11)]
    assert [fields.get("samples_per_second") for _, fields in logged] == [None, 10.0, 50.0]
    assert logged[0][1].keys() == {"step", "samples", "memory", "utilization", "heat"}, "unknown values are omitted"
    assert (logged[0][1]["heat"], logged[0][1]["utilization"]) == ("hot", {})


class QueuedSteps:
    """A recorder whose device is behind the host. Each step of the host takes 0.6 s, so outcomes are read after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reader = FakeReader()
        self._device = FakeDevice(reader=self.reader)
        self.logged: list[tuple[str, int]] = []
        self.recorder = Recorder(
            None, self._device, on_event=lambda kind, fields: self.logged.append((kind, fields["step"]))
        )
        monkeypatch.setattr("whet.training.callbacks.event_log.time.monotonic", lambda: 1e6 + self._device.seconds)

    def step(self, number: int, *, finished: int) -> None:
        """Launch a step on a device that has finished the step `finished`."""
        self._device.pass_time(0.6)
        self.reader.reached = max(self.reader.reached, 0.6 * finished + 0.01)
        batch: Any = SimpleNamespace(ids=np.arange(2), is_last_of_epoch=False)
        outcome = Outcome(loss=torch.tensor(float(number)), grad_norm=None, marks=())
        self.recorder.after_step(State(step=number, samples=number, batch=batch), outcome)


def test_the_newest_steps_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them would leave the device without work until the host has launched the next step."""
    queued = QueuedSteps(monkeypatch)
    for number in range(1, 8):
        queued.step(number, finished=number - 1)
    assert queued.reader.waited_for == []
    assert [step for _, step in queued.logged] == [1, 2, 3, 4, 5, 6]
    queued.recorder.read()
    assert queued.logged[-1] == ("step", 7)


def test_a_host_far_ahead_of_its_device_waits_for_the_steps_of_the_last_read(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = QueuedSteps(monkeypatch)
    for number in range(1, 6):
        queued.step(number, finished=0)
    assert queued.reader.waited_for == pytest.approx([0.6, 1.2, 1.8, 2.4]), "one step stays queued"
    assert [step for _, step in queued.logged] == [1, 2, 3, 4]


def test_deferred_events_follow_the_step_they_belong_to(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = QueuedSteps(monkeypatch)
    for number in (1, 2, 3):
        queued.step(number, finished=number - 1)
        queued.recorder.defer("health", step=number)
    assert queued.logged == [("step", 1), ("health", 1), ("step", 2), ("health", 2)]
    queued.recorder.read()
    assert queued.logged[4:] == [("step", 3), ("health", 3)]


def test_each_phase_of_a_step_ends_at_a_later_mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Simulated: MPS raises for the time between a mark and itself. Data on the device has no transfer."""
    number = iter(range(10**6))

    def elapsed_seconds(_device: CpuDevice, start: int, end: int) -> float:
        assert end > start
        return float(end - start)

    monkeypatch.setattr(CpuDevice, "mark", lambda _device: next(number))
    monkeypatch.setattr(CpuDevice, "elapsed_seconds", elapsed_seconds)
    train(tmp_path / "run", overrides={"data_location": "device", "micro_batch": 4, "threads": 1})
    phases = {phase for event in events(tmp_path / "run", "step") for phase in event.get("seconds")}
    assert {"data", "forward", "backward", "optimizer"} <= phases
    assert "transfer" not in phases


def test_usage_of_this_process_is_read_from_the_system() -> None:
    usage = ProcessUsage()
    held = bytearray(b"x") * 80_000_000
    before = usage()
    del held
    after = usage()
    assert before.process_bytes is not None
    assert after.process_bytes is not None
    assert before.process_bytes - after.process_bytes > 60_000_000


def test_the_norm_of_the_gradient_is_taken_now_and_then_without_clipping(tmp_path: Path) -> None:
    train(tmp_path / "plain", epochs=2)
    norms = {event.step: event.number("grad_norm") for event in events(tmp_path / "plain", "step")}
    assert [step for step, norm in norms.items() if norm is not None] == [NORM_EVERY, 2 * NORM_EVERY]
    # A bound that no gradient reaches changes nothing, but computes every norm.
    train(tmp_path / "clipped", epochs=2, clip=1e9)
    clipped = {event.step: event.number("grad_norm") for event in events(tmp_path / "clipped", "step")}
    assert all(norm is not None and norm > 0 for norm in clipped.values())
    assert norms[NORM_EVERY] == pytest.approx(clipped[NORM_EVERY], rel=1e-6)


def test_an_evaluation_may_log_more_than_numbers(tmp_path: Path) -> None:
    def evaluate(model: nn.Module, micro_batches: Any) -> dict[str, Any]:
        samples = [{"input": "x" * 1_000, "expected": "a", "predicted": number} for number in range(40)]
        confusion = {"labels": ["a", "b"], "counts": torch.tensor([[3, 1], [0, 4]])}
        return {"accuracy": torch.tensor(0.875), "confusion": confusion, "samples": samples}

    shown: list[tuple[str, dict[str, Any]]] = []
    val = images(8, seed=1)
    _, result = train(
        tmp_path / "run",
        evaluate=evaluate,
        val=val,
        test=val,
        goal="accuracy",
        on_event=lambda *logged: shown.append(logged),
    )
    assert result.metrics == {"accuracy": 0.875, "test_accuracy": 0.875}
    on_dev, on_test = events(tmp_path / "run", "eval")
    assert on_dev.get("confusion") == {"labels": ["a", "b"], "counts": [[3, 1], [0, 4]]}
    assert on_test.get("test_confusion") == on_dev.get("confusion")
    assert len(on_dev.get("samples")) == metrics.MAX_SAMPLES
    assert len(on_dev.get("samples")[0]["input"]) == metrics.MAX_CHARACTERS
    assert on_dev.get("samples")[3]["predicted"] == 3
    assert whet.summarize(tmp_path / "run").metrics == result.metrics
    assert not events(tmp_path / "run", "warning")


def test_of_many_classes_the_rarest_become_one() -> None:
    size = metrics.MAX_CLASSES + 10
    counts = [[0] * size for _ in range(size)]
    for truth in range(size):
        counts[truth][truth] = truth
        counts[truth][0] += 1
    actual = metrics.normalize_metrics({"confusion": {"labels": [f"c{n}" for n in range(size)], "counts": counts}})
    confusion = actual["confusion"]
    assert len(confusion["labels"]) == len(confusion["counts"]) == metrics.MAX_CLASSES
    assert confusion["labels"][-1] == metrics.OTHER_CLASS
    assert confusion["labels"][-2] == f"c{size - 1}"
    assert sum(map(sum, confusion["counts"])) == sum(map(sum, counts))
    assert confusion["counts"][-1][-1] == sum(range(11)) + 11
    scores = {"labels": [f"c{n}" for n in range(size)], "f1": [n / size for n in range(size)], "support": range(size)}
    classes = metrics.normalize_metrics({"classes": scores})["classes"]
    assert classes["labels"] == [f"c{n}" for n in range(10, size)], "the most frequent, in their order"
    assert classes["f1"] == [n / size for n in range(10, size)]


@pytest.mark.parametrize(
    ("actual", "what"),
    [
        ({"accuracy": "high"}, "'accuracy' is not a number"),
        ({"accuracy": None}, "'accuracy' is not a number"),
        ({"table": {"labels": ["a"], "counts": [[1]]}}, "'table' is not a number"),
        ({"confusion": {"labels": ["a", "b"], "counts": [[1, 2]]}}, "a row and a column for each label"),
        ({"confusion": {"labels": ["a"], "counts": [[-1]]}}, "counts samples"),
        ({"confusion": [[1]]}, 'try: {"labels"'),
        ({"confusion": {"labels": [], "counts": []}}, "a row and a column for each label"),
        ({"confusion": {"labels": ["a"], "counts": [["x"]]}}, "a row and a column for each label"),
        ({"classes": {"labels": ["a", "b"], "f1": [1.0]}}, "a number for each label"),
        ({"test_classes": {"labels": ["a"], "f1": ["x"]}}, "a number for each label"),
        ({"classes": {"labels": ["a"]}}, "a number for each label"),
        ({"samples": ["text"]}, "samples must be dicts"),
    ],
)
def test_invalid_metrics_are_refused(actual: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError) as caught:
        metrics.normalize_metrics(actual)
    assert what in str(caught.value)
