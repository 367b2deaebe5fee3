"""Batches that were recorded for another process equal those of the source."""

import collections
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from whet.data.adapters import open_source
from whet.data.batch import Position, Ragged
from whet.data.recorded import RecordedBatches, RecordedSource
from whet.data.split import slice_micro_batch
from whet.device.cpu import CpuDevice

pytestmark = pytest.mark.torch

NUM_SAMPLES, BATCH = 21, 4
Pair = collections.namedtuple("Pair", "image label")


class Squares(Dataset):
    """Map-style, with random numbers and names."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return {"x": torch.rand(3) + index, "name": f"sample {index}"}


class Tokens(Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return {"input_ids": list(range(1, 2 + index % 5)), "labels": index % 2}


def noisy(samples):
    return {"x": torch.stack([s["x"] for s in samples]) + torch.rand(1), "names": [s["name"] for s in samples]}


def columns():
    return torch.arange(NUM_SAMPLES * 3.0).view(NUM_SAMPLES, 3), torch.arange(NUM_SAMPLES)


CASES = {
    "tuple": lambda: (columns(), {}),
    "named tuple": lambda: (Pair(*columns()), {}),
    "dict": lambda: ({"x": columns()[0], "y": columns()[1].numpy()}, {}),
    "tensor": lambda: (columns()[0], {}),
    "ragged": lambda: ({"x": Ragged.of([torch.arange(1.0 + i % 4) for i in range(NUM_SAMPLES)])}, {}),
    "loader of tensors": lambda: (DataLoader(TensorDataset(*columns()), batch_size=BATCH, shuffle=True), {}),
    "loader with collate": lambda: (DataLoader(Squares(), batch_size=BATCH, shuffle=True, collate_fn=noisy), {}),
    "dataset": lambda: (Squares(), {}),
    "dataset with collate": lambda: (Squares(), {"collate_fn": noisy}),
    "tokens": lambda: (Tokens(), {"pad_token_id": 0}),
}


def contents(micro):
    def plain(value):
        if isinstance(value, torch.Tensor):
            return value.tolist(), value.dtype
        if isinstance(value, dict):
            return {name: plain(part) for name, part in value.items()}
        if isinstance(value, tuple | list):
            return [plain(part) for part in value]
        return [plain(value.values), plain(value.lengths)] if hasattr(value, "lengths") else value

    return plain(micro.data), type(micro.data), micro.ids.tolist(), micro.first_index


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("micro_batch", [BATCH, 3])
def test_recorded_batches_equal_those_of_the_source(case, micro_batch):
    data, options = CASES[case]()
    device = CpuDevice()
    source = open_source(data, device, global_batch_size=BATCH, seed=5, is_resident=False, **options)
    # The last batch of the epoch is smaller.
    batches = list(source.batches(Position()))
    recorded = source.record(batches)
    if case != "named tuple":
        recorded = pickle.loads(pickle.dumps(recorded))
    replayed = open_source(recorded, device, global_batch_size=BATCH, seed=5, is_resident=False)
    assert isinstance(replayed, RecordedSource)
    assert (replayed.num_batches, replayed.num_samples) == (6, NUM_SAMPLES)
    again = list(replayed.batches(Position()))
    assert [batch.after for batch in again] == [batch.after for batch in batches]
    # A batch may be split later and in any order.
    for batch, same in zip(reversed(batches), reversed(again), strict=True):
        expected = source.micro_batches(batch, micro_batch=micro_batch, length_mode="sorted")
        actual = replayed.micro_batches(same, micro_batch=micro_batch, length_mode="sorted")
        assert [contents(micro) for micro in actual] == [contents(micro) for micro in expected]


def test_only_rows_of_the_batches_are_recorded():
    big = torch.arange(100_000.0).view(1000, 100)
    source = open_source((big,), CpuDevice(), global_batch_size=BATCH, seed=5)
    batches = list(source.batches(Position()))[:2]
    recorded = source.record(batches)
    assert isinstance(recorded, RecordedBatches)
    ids = np.sort(np.concatenate([batch.ids for batch in batches]))
    assert torch.equal(recorded.columns["x"], big[torch.from_numpy(ids)])
    assert recorded.columns["x"].untyped_storage().nbytes() == 2 * BATCH * 100 * 4


@pytest.mark.parametrize("case", CASES)
def test_slices_of_a_micro_batch_have_its_samples_and_its_type(case):
    data, options = CASES[case]()
    source = open_source(data, CpuDevice(), global_batch_size=7, seed=5, is_resident=False, **options)
    if isinstance(data, DataLoader):
        source = open_source(
            DataLoader(data.dataset, batch_size=7, collate_fn=data.collate_fn), CpuDevice(), global_batch_size=7, seed=5
        )
    batch = next(source.batches(Position()))
    whole = next(source.micro_batches(batch, micro_batch=7, length_mode="fixed"))
    slices = slice_micro_batch(whole, 3)
    if "collate" in case or case in ("dataset", "tokens"):
        # The names of all samples are in a list, which a slice of the tensors would not shorten.
        assert slices is None or case == "tokens"
        if slices is None:
            return
    assert [len(part) for part in slices] == [2, 2, 3]
    assert np.concatenate([part.ids for part in slices]).tolist() == whole.ids.tolist()
    assert {type(part.data) for part in slices} == {type(whole.data)}
    for name, field in whole.fields.items():
        pick = (lambda f: f) if isinstance(field, torch.Tensor) else (lambda f: f.values)
        assert torch.equal(torch.cat([pick(part.fields[name]) for part in slices]), pick(field))


def test_a_packed_or_single_micro_batch_is_not_sliced():
    data = {"x": Ragged.of([torch.arange(1.0 + i % 4) for i in range(NUM_SAMPLES)])}
    source = open_source(data, CpuDevice(), global_batch_size=BATCH, seed=5)
    batch = next(source.batches(Position()))
    (packed,) = source.micro_batches(batch, micro_batch=BATCH, length_mode="packed")
    assert slice_micro_batch(packed, 3) is None
    single = next(source.micro_batches(batch, micro_batch=1, length_mode="fixed"))
    assert slice_micro_batch(single, 3) is None
