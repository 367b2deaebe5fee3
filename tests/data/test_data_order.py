"""The order of samples is a pure function, and its values never change."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whet.data.adapters import open_source
from whet.data.batch import Position
from whet.data.order import epoch_order, mix_seed, sample_seed
from whet.device.cpu import CpuDevice

pytestmark = pytest.mark.torch


def test_the_order_is_frozen() -> None:
    """A change of these numbers would break the resume of every existing run."""
    assert epoch_order(8, seed=0, epoch=0).tolist() == [4, 7, 6, 0, 3, 2, 1, 5]
    assert epoch_order(8, seed=1, epoch=2).tolist() == [6, 2, 4, 5, 3, 7, 1, 0]
    assert mix_seed(1, 2, 3) == 2869315087210772132


@given(st.integers(0, 300), st.integers(0, 2**63), st.integers(0, 1000))
def test_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(num_samples, seed=seed, epoch=epoch).tolist()) == list(range(num_samples))


def test_all_orders_are_about_equally_likely() -> None:
    counts = Counter(tuple(epoch_order(4, seed=seed, epoch=0)) for seed in range(4_800))
    assert len(counts) == 24
    expected = 4_800 / 24
    # The 99.9 % point of chi-square with 23 degrees of freedom is 49.7.
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 49.7


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(epoch_order(20, seed=seed, epoch=epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_the_order_can_be_left_alone() -> None:
    assert epoch_order(5, seed=3, epoch=1, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_a_samples_randomness_has_its_own_seed() -> None:
    seeds = {sample_seed(seed, epoch, sample) for seed in range(5) for epoch in range(5) for sample in range(5)}
    assert len(seeds) == 125


class Noisy:
    """A map-style data set whose samples draw from every generator."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, object]:
        import random

        return {"id": index, "noise": torch.rand(()) + np.random.rand() + random.random()}


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_the_same_whoever_reads_them(workers: int) -> None:
    from whet.data.adapters import LoadingConfig

    source = open_source(Noisy(), CpuDevice(), global_batch_size=4, seed=7, loading=LoadingConfig(workers=workers))
    state = torch.get_rng_state()
    seen = []
    for epoch in range(2):
        for batch in source.batches(Position(epoch=epoch)):
            for micro in source.micro_batches(batch, micro_batch=2, length_mode="fixed"):
                assert micro.id.tolist() == micro.ids.tolist()
                seen += micro.noise.tolist()
    source.close()
    assert torch.equal(torch.get_rng_state(), state), "reading does not change the draws of the training"
    expected = _expected_noise()
    assert seen == expected
    assert len(set(seen)) == 20


def _expected_noise() -> list[float]:
    source = open_source(Noisy(), CpuDevice(), global_batch_size=10, seed=7)
    return [
        value
        for epoch in range(2)
        for batch in source.batches(Position(epoch=epoch))
        for micro in source.micro_batches(batch, micro_batch=10, length_mode="fixed")
        for value in micro.noise.tolist()
    ]


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 39))
def test_a_position_continues_the_same_epoch(num_samples: int, size: int, consumed: int) -> None:
    data = torch.arange(num_samples)
    source = open_source({"x": data}, CpuDevice(), global_batch_size=size, seed=1)
    whole = list(source.batches(Position()))
    assert np.concatenate([b.ids for b in whole]).tolist() == epoch_order(num_samples, seed=1, epoch=0).tolist()
    assert [len(b) for b in whole[:-1]] == [size] * (len(whole) - 1)
    assert whole[-1].is_last_of_epoch
    assert whole[-1].after == Position(epoch=1)
    for done, batch in enumerate(whole[:-1]):
        rest = list(source.batches(batch.after))
        assert [b.ids.tolist() for b in rest] == [b.ids.tolist() for b in whole[done + 1 :]]
