"""Data of a session: streams, ragged columns, workers, arrays."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import whet
from small_models import convnet, images
from small_training import small_workload, train
from whet.base.errors import WhetError
from whet.data.stream_reader import StatefulIterable
from whet.run.events import read_events
from whet.run.folder import open_run

pytestmark = pytest.mark.torch


class Counting:
    """A stream that can return its position."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.at = 0

    def __iter__(self):
        while self.at < self.count:
            self.at += 1
            yield {"x": torch.tensor([float(self.at)]), "y": torch.tensor(0)}
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("has_state", [True, False])
def test_a_stream_resumes_at_its_position(tmp_path: Path, has_state: bool) -> None:
    seen: list[list[float]] = []
    model = nn.Linear(1, 2)

    def loss(micro):
        seen.append(micro.x.flatten().tolist())
        return nn.functional.cross_entropy(model(micro.x), micro.y)

    def data():
        return Counting(10) if has_state else list_stream(10)

    options = {"epochs": 2, "global_batch_size": 4, "run": tmp_path / "run", "overrides": {"micro_batch": 4}}
    options["workload"] = small_workload().model_copy(update={"activation_bytes": 1, "global_batch_size": 4})
    train(model, data(), loss=loss, max_steps=2, **options)
    train(model, data(), loss=loss, max_steps=6, **options)
    expected = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10], [1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    assert seen == expected
    resumed = next(iter(read_events(open_run(tmp_path / "run"), kinds=("resume",))))
    # The loss also keeps a list of its own, which is named in both cases.
    assert ("a stream without a state" in (resumed.get("reason") or "")) is not has_state
    assert isinstance(data(), StatefulIterable) is has_state


class list_stream:  # noqa: N801
    """An iterable that restarts each time and cannot return its position."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        return ({"x": torch.tensor([float(n + 1)]), "y": torch.tensor(0)} for n in range(self.count))


def test_a_first_micro_batch_in_which_nothing_counts_does_no_harm() -> None:
    """Weights 0, then 2: only the samples with a weight determine the step."""
    finals = []
    for micro_batch in (4, 2):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
        counts = torch.tensor([0.0, 0.0, 1.0, 1.0])

        def loss(micro, model=model):
            return (model(micro.x).squeeze(1).square() * micro.y).sum(), micro.y.sum()

        train(model, (x, counts), loss=loss, global_batch_size=4, shuffle=False, overrides={"micro_batch": micro_batch})
        finals.append(model.weight.detach().clone())
    assert finals[0].isfinite().all()
    torch.testing.assert_close(finals[0], finals[1])


def test_a_batch_in_which_nothing_counts_changes_nothing() -> None:
    model = nn.Linear(3, 1)
    before = model.weight.detach().clone()
    for weight in (torch.tensor(0.0), 0.0):
        train(model, torch.randn(8, 3), loss=lambda m, w=weight: (model(m).sum() * 0, w))
    assert torch.equal(model.weight, before)


def test_several_ragged_columns_are_padded_each_to_its_own_length() -> None:
    from whet.data.adapters import open_source
    from whet.data.batch import Position, Ragged
    from whet.device.cpu import CpuDevice

    short = Ragged.of([torch.arange(n) for n in (1, 2, 3, 1)])
    long = Ragged.of([torch.arange(n) + 10 for n in (9, 2, 4, 7)])
    source = open_source({"short": short, "long": long}, CpuDevice(), global_batch_size=4, seed=0)
    for how in ("fixed", "sorted", "bucketed"):
        for batch in source.batches(Position()):
            for micro in source.micro_batches(batch, micro_batch=3, length_mode=how):
                for name, column in (("short", short), ("long", long)):
                    padded = getattr(micro, name)
                    for row, sample in enumerate(micro.ids.tolist()):
                        length = int(padded.lengths[row])
                        assert torch.equal(padded.values[row, :length], column[sample]), (how, name)


def test_other_data_is_refused_and_shorter_data_does_not_hang(tmp_path: Path) -> None:
    model = convnet()
    train(model, images(64, seed=0), run=tmp_path / "run", max_steps=4)
    for data in (images(64, seed=1), images(24, seed=0), images(128, seed=0)):
        with pytest.raises(WhetError, match="the data is not what the run was started with"):
            train(model, data, run=tmp_path / "run", max_steps=9)


def test_a_stream_with_a_state_can_stop_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    model = nn.Linear(1, 2)
    options = {"epochs": 3, "global_batch_size": 4, "epochs_per_session": 1, "run": tmp_path / "run"}
    for session in (1, 2, 3):
        assert train(model, Counting(8), **options).step == 2 * session


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_survive_an_interrupt(start: str) -> None:
    import os
    import signal

    from whet.data.adapters import LoadingConfig, open_source
    from whet.data.batch import Position
    from whet.device.cpu import CpuDevice

    source = open_source(
        Squares(), CpuDevice(), global_batch_size=4, seed=0, loading=LoadingConfig(workers=1, start=start)
    )
    batches = source.batches(Position())
    first = next(batches)
    assert source.workers is not None
    (worker,) = source.workers._workers
    os.kill(worker.process.pid, signal.SIGINT)
    assert len(first) + sum(len(batch) for batch in batches) == 40
    source.close()


class Squares:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index * index


def test_numpy_arrays_are_data() -> None:
    x = np.random.default_rng(0).normal(size=(16, 3))
    model = nn.Linear(3, 2)
    seen: list[torch.dtype] = []

    def loss(micro):
        seen.append(micro.x.dtype)
        return nn.functional.cross_entropy(model(micro.x), micro.y)

    train(model, (x, np.zeros(16, dtype=np.int64)), loss=loss)
    assert set(seen) == {torch.float32}


class Named:
    """Samples as NumPy gives them: an array of numbers, a number, a string."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.full(3, float(index)), "y": np.int64(index % 2), "name": np.array([f"{index}"])[0]}


@pytest.mark.parametrize("form", ["dataset", "dict", "tuple", "lists"])
def test_columns_that_torch_cannot_hold_stay_on_the_host(form: str) -> None:
    x, y, names = np.arange(36.0).reshape(12, 3) / 36, np.arange(12) % 2, np.array([f"{n}" for n in range(12)])
    data: Any = {
        "dataset": Named(),
        "dict": {"x": x, "y": y, "name": names},
        "tuple": (x, y, names),
        "lists": (x, y.tolist(), names.tolist()),
    }[form]
    model, seen = nn.Linear(3, 2), []

    def loss(batch: Any) -> Tensor:
        of_x, of_y, of_name = batch if isinstance(batch, tuple) else batch.values()
        seen.extend(zip(of_name, of_y.tolist(), strict=True))
        return nn.functional.cross_entropy(model(of_x), of_y)

    assert train(model, data, loss=loss, global_batch_size=4, overrides={"workers": 0}).step == 3
    assert {(str(name), label) for name, label in seen} == {(f"{n}", n % 2) for n in range(12)}


def test_a_tuple_with_lists_of_unequal_lengths_is_refused() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(WhetError, match=r"columns must have equal lengths\n.*x: 12, y: 11"):
        train(model, (torch.zeros(12, 3), [0] * 11), loss=nn.functional.cross_entropy, global_batch_size=4)


class Sentences:
    """Samples of unequal lengths; the last batch has one sample alone."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int):
        return {"tokens": torch.ones(1 + index % 4), "y": 0}


def test_a_lonely_sample_has_the_form_of_the_others() -> None:
    from whet.data.batch import Padded

    seen: list[type] = []
    model = nn.Linear(1, 2)

    def loss(micro):
        seen.append(type(micro.tokens))
        means = micro.tokens.values.sum(1, keepdim=True)
        return nn.functional.cross_entropy(model(means), micro.y)

    train(model, Sentences(), loss=loss, global_batch_size=4, overrides={"workers": 0})
    assert set(seen) == {Padded}


def test_every_row_of_a_small_table_counts_in_its_fingerprint(tmp_path: Path) -> None:
    x, y = images(640, seed=0)
    train(convnet(), (x, y), run=tmp_path / "run", max_steps=2)
    changed = x.clone()
    changed[123] += 1e-3
    with pytest.raises(WhetError, match="not what the run was started with"):
        train(convnet(), (changed, y), run=tmp_path / "run", max_steps=4)


@pytest.mark.parametrize("form", ["list", "tuple", "dict"])
def test_a_collate_function_gets_rows(form: str) -> None:
    rows = [torch.arange(1.0, 2 + n % 3) for n in range(12)]
    x, y = torch.randn(12, 3), torch.randn(12, 1)
    data = {"list": rows, "tuple": (x, y), "dict": {"x": x, "y": y, "name": list("abcdefghijkl")}}[form]
    seen: list[object] = []

    def collate(samples: list[Any]) -> Tensor:
        seen.extend(samples)
        first = [sample if form == "list" else sample["x" if form == "dict" else 0] for sample in samples]
        return nn.utils.rnn.pad_sequence(first, batch_first=True)[:, :1]

    model = nn.Linear(1, 1)
    result = whet.train(
        model,
        data,
        loss=lambda batch: model(batch).square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        collate_fn=collate,
        global_batch_size=4,
        val=data,
        overrides={"workers": 0},
        on_event=None,
    )
    assert result.step == 3
    assert "val_loss" in result.metrics
    assert {type(sample) for sample in seen} == {{"list": Tensor, "tuple": tuple, "dict": dict}[form]}


def test_a_list_of_tensors_is_refused_because_it_is_ambiguous() -> None:
    # [x, y] is written for (x, y), and a short list of samples looks the same.
    model = nn.Linear(3, 1)
    with pytest.raises(WhetError, match="may be a list of samples or of columns") as refused:
        whet.train(
            model,
            [torch.randn(3) for _ in range(3)],
            loss=lambda batch: model(batch).square().mean(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            global_batch_size=3,
            on_event=None,
        )
    assert "torch.stack(data)" in str(refused.value)
