"""Iterables of samples: their state, their epochs and their random numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loader_cases import SIZE, RandomStream, X, Y
from loader_runs import differences, resumed_batches, run_batches
from whet.base.errors import UsageError
from whet.training.restore import CUSTOM_LOOP

pytestmark = pytest.mark.torch


class StateStream:
    """Has a position and an epoch, both in its state, and draws noise from torch's generator."""

    def __init__(self, noise: float = 1.0) -> None:
        self.at = self.epoch = 0
        self.noise = noise

    def __iter__(self):
        while self.at < SIZE:
            self.at += 1
            yield {"x": X[self.at - 1] + self.epoch + self.noise * torch.randn(()), "y": Y[self.at - 1]}
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


@pytest.mark.parametrize(
    "kill",
    # In the gate: the last step of an epoch, and within one.
    [kill if kill in (4, 7) else pytest.param(kill, marks=pytest.mark.slow) for kill in range(2, 12)],
)
def test_a_stream_with_a_state_resumes_at_any_step(kill: int, memory_folder: Path) -> None:
    """At the end of an epoch too, and with the noise that the uninterrupted run draws."""
    whole = run_batches(StateStream(), epochs=3, global_batch_size=6)
    resumed = resumed_batches(StateStream, memory_folder / "run", kill=kill, epochs=3, global_batch_size=6)
    expected = whole.batches[(kill - 1) // 2 * 2 :]
    assert [differences(a, b) for a, b in zip(resumed.batches, expected, strict=True)] == [None] * len(expected)
    assert torch.equal(resumed.weights, whole.weights)
    assert resumed.exactness.startswith(CUSTOM_LOOP)


def test_what_a_stream_draws_does_not_move_the_draws_of_steps() -> None:
    quiet = StateStream(noise=0.0)
    silent = [{"x": X[i] + epoch, "y": Y[i]} for epoch in range(1) for i in range(SIZE)]
    ours = run_batches(quiet, epochs=1, global_batch_size=6)
    theirs = run_batches(silent, epochs=1, global_batch_size=6, shuffle=False)
    assert torch.equal(ours.weights, theirs.weights)


@pytest.mark.parametrize("kill", [pytest.param(4, marks=pytest.mark.slow), 6])
def test_a_random_stream_is_repeated_although_that_is_not_claimed(kill: int, tmp_path: Path) -> None:
    whole = run_batches(RandomStream(), epochs=3, global_batch_size=6)
    assert differences(whole.batches[0], whole.batches[4]) is not None, "each epoch has its own noise"
    resumed = resumed_batches(RandomStream, tmp_path / "run", kill=kill, epochs=3, global_batch_size=6)
    assert torch.equal(resumed.weights, whole.weights)
    assert "a stream without a state" in resumed.exactness


def test_a_stream_is_told_its_epoch() -> None:
    epochs: list[int] = []

    class Epochs(RandomStream):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

    run_batches(Epochs(), epochs=3, global_batch_size=6)
    assert epochs == [0, 1, 2]


def test_a_state_that_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    class WithFunction(StateStream):
        def state_dict(self) -> Any:
            return {"at": self.at, "next": iter}

    with pytest.raises(UsageError, match=r"state of the data .* cannot be saved without pickle\n.*next is a builtin"):
        run_batches(WithFunction(), global_batch_size=6, run=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def hugging_face(num_shards: int, shuffles: bool) -> Callable[[], Any]:
    datasets = pytest.importorskip("datasets")

    def make() -> Any:
        table = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()})
        stream = table.to_iterable_dataset(num_shards=num_shards)
        return stream.shuffle(seed=1, buffer_size=1) if shuffles else stream

    return make


@pytest.mark.parametrize("kill", [4, 6, 8])
@pytest.mark.parametrize(("num_shards", "shuffles"), [(1, False), (4, False), (4, True)])
def test_a_stream_of_hugging_face(num_shards: int, shuffles: bool, kill: int, tmp_path: Path) -> None:
    make = hugging_face(num_shards, shuffles)
    whole = run_batches(make(), epochs=3, global_batch_size=6)
    assert len(whole.batches) == 12
    for start in range(0, 12, 4):
        labels = torch.cat([batch["y"] for batch in whole.batches[start : start + 4]])
        assert sorted(labels.tolist()) == sorted(Y.tolist())
    resumed = resumed_batches(make, tmp_path / "run", kill=kill, epochs=3, global_batch_size=6)
    expected = whole.batches[(kill - 1) // 2 * 2 :]
    assert [differences(a, b) for a, b in zip(resumed.batches, expected, strict=True)] == [None] * len(expected)
    assert resumed.exactness.startswith(CUSTOM_LOOP)
