"""Draws from a dataset, with and without replacement: the order of RandomSampler(num_samples=...)."""

import itertools

import numpy as np
import pytest

pytestmark = pytest.mark.torch


def _ids(order, position):
    return [batch.ids.tolist() for batch in order.batches(position)]


@pytest.mark.parametrize("replacement", [True, False])
def test_a_resumed_epoch_draws_the_same_samples(replacement):
    from whet.data.batch import Position
    from whet.data.order import RepeatingOrder

    order = RepeatingOrder(7, num_draws=20, replacement=replacement, batch_size=3, seed=5)
    whole = _ids(order, Position(epoch=2))
    assert [len(ids) for ids in whole] == [3, 3, 3, 3, 3, 3, 2]
    assert _ids(order, Position(epoch=2, samples=9)) == whole[3:]
    assert _ids(order, Position(epoch=3)) != whole


def test_without_replacement_every_pass_has_every_sample_once():
    from whet.data.batch import Position
    from whet.data.order import RepeatingOrder

    order = RepeatingOrder(7, num_draws=21, replacement=False, batch_size=4, seed=5)
    drawn = np.concatenate([batch.ids for batch in order.batches(Position())])
    assert [sorted(drawn[start : start + 7]) for start in (0, 7, 14)] == [list(range(7))] * 3
    assert list(drawn[:7]) != list(drawn[7:14])


@pytest.mark.parametrize("replacement", [True, False])
def test_more_draws_than_fit_into_memory(replacement):
    from whet.data.batch import Position
    from whet.data.order import RepeatingOrder

    # minGPT asks for 10^10 draws and stops after a number of steps.
    order = RepeatingOrder(7, num_draws=10**10, replacement=replacement, batch_size=4, seed=5)
    first = list(itertools.islice(order.batches(Position()), 2))
    assert [batch.after for batch in first] == [Position(samples=4), Position(samples=8)]
    late = next(order.batches(Position(samples=9 * 10**9)))
    assert len(late.ids) == 4
    assert not late.is_last
