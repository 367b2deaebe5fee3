"""Samplers of the user: orders that are repeated, saved, or named as not exact."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler, WeightedRandomSampler

import whet
from loader_cases import (
    PAIRS,
    SIZE,
    TENSORS,
    EndlessSampler,
    EpochSampler,
    GlobalSampler,
    HiddenSampler,
    Samples,
    StateSampler,
    StreamSampler,
    VaryingBatches,
    X,
    generator,
)
from loader_runs import resumed_batches, run_batches
from whet.base.errors import UsageError
from whet.data.batch import Position
from whet.data.loader import loader_batch_size, loader_order
from whet.training.restore import CUSTOM_LOOP

pytestmark = pytest.mark.torch


def loader(sampler: Any, **options: Any) -> DataLoader:
    return DataLoader(TENSORS, batch_size=6, sampler=sampler, **options)


def test_a_sampler_decides_which_samples_there_are() -> None:
    """`range(10)` in a sampler means the first ten samples of a larger dataset."""
    for sampler in (SequentialSampler(range(10)), RandomSampler(range(10)), RandomSampler(range(10), num_samples=25)):
        ids = run_batches(loader(sampler), epochs=1).ids
        assert {number for batch in ids for number in batch} == set(range(10))
        assert sum(map(len, ids)) == len(sampler)


def test_the_weights_of_a_sampler_are_kept() -> None:
    sampler = WeightedRandomSampler([0.0] * 10 + [1.0] * 10, 60)
    ids = run_batches(loader(sampler), epochs=1).ids
    assert min(number for batch in ids for number in batch) == 10


@pytest.mark.parametrize("sampler", [EpochSampler, StateSampler, StreamSampler])
def test_the_order_of_a_sampler_is_its_own(sampler: type) -> None:
    """Where a sampler decides its order itself, epochs are those of a plain loop."""
    plain, expected = sampler(), []
    for epoch in range(3):
        if hasattr(plain, "set_epoch"):
            plain.set_epoch(epoch)
        expected += list(BatchSampler(plain, 6, drop_last=False))
    assert run_batches(loader(sampler()), epochs=3).ids == expected


# In the gate: within an epoch, in its last step, and in the first one of the next.
KILLS = [
    (sampler, kill) if (sampler, kill) in chosen else pytest.param(sampler, kill, marks=pytest.mark.slow)
    for chosen in [((StateSampler, 4), (StateSampler, 5), (StreamSampler, 7))]
    for sampler in (StateSampler, StreamSampler)
    for kill in range(2, 12)
]


@pytest.mark.parametrize(("sampler", "kill"), KILLS)
def test_a_sampler_with_a_state_resumes_at_any_step(sampler: type, kill: int, memory_folder: Path) -> None:
    """At the end of an epoch too: its state has the number of the epoch."""
    whole = run_batches(loader(sampler()), epochs=3)
    resumed = resumed_batches(lambda: loader(sampler()), memory_folder / "run", kill=kill, epochs=3)
    assert resumed.ids == whole.ids[(kill - 1) // 2 * 2 :]
    assert torch.equal(resumed.weights, whole.weights)
    assert resumed.exactness.startswith(CUSTOM_LOOP)


class ResettingSampler(StateSampler):
    """Goes back to the beginning at set_epoch, as some samplers do."""

    def set_epoch(self, epoch: int) -> None:
        self.at, self.epoch = 0, epoch


def test_set_epoch_does_not_lose_the_position(tmp_path: Path) -> None:
    whole = run_batches(loader(ResettingSampler()))
    resumed = resumed_batches(lambda: loader(ResettingSampler()), tmp_path / "run", kill=4)
    assert resumed.ids == whole.ids[2:]


def test_a_sampler_with_a_state_rolls_back(tmp_path: Path) -> None:
    class RollBackOnce(whet.Callback):
        is_done = False

        def after_step(self, state, outcome) -> whet.Action:
            if state.step == 3 and not self.is_done:
                self.is_done = True
                return whet.Action.ROLLBACK("once")
            return whet.Action.NONE

    whole = run_batches(loader(StateSampler()))
    again = run_batches(
        loader(StateSampler()), run=tmp_path / "run", callbacks=[RollBackOnce()], overrides={"checkpoint_steps": 100}
    )
    assert again.ids == whole.ids[:3] + whole.ids
    assert torch.equal(again.weights, whole.weights)


def test_a_state_that_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    class WithFunction(StateSampler):
        def state_dict(self):
            return {"order": print}

    with pytest.raises(UsageError, match=r"state of the data .* cannot be saved without pickle\n.*order is a builtin"):
        run_batches(loader(WithFunction()), run=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_a_sampler_with_a_state_has_a_known_number_of_steps() -> None:
    assert loader_order(loader(StateSampler()), seed=0).num_batches == len(loader(StateSampler())) == 4
    assert loader_order(loader(StateSampler(), drop_last=True), seed=0).num_batches == 3
    assert loader_order(loader(StreamSampler()), seed=0).num_batches is None


def test_an_endless_sampler_needs_max_steps(tmp_path: Path) -> None:
    seen = resumed_batches(lambda: loader(EndlessSampler()), tmp_path / "run", kill=4, max_steps=9)
    assert "EndlessSampler has no length" in seen.exactness
    # Its batches are seeded by their position, so that they are repeated anyway.
    whole = run_batches(loader(EndlessSampler()), max_steps=9)
    assert seen.ids == whole.ids[2:]
    assert len({tuple(ids) for ids in whole.ids}) == 9


def test_an_endless_sampler_with_a_length_is_refused() -> None:
    class Endless(EndlessSampler):
        def __len__(self) -> int:
            return SIZE

    with pytest.raises(UsageError, match="yields more than its length says"):
        run_batches(loader(Endless()), max_steps=3)


@pytest.mark.parametrize("sampler", [HiddenSampler, GlobalSampler, EpochSampler, StateSampler])
def test_describing_a_loader_does_not_draw_from_it(sampler: type) -> None:
    """The first epoch is the one that a plain loop would have."""
    made = sampler()
    before = made.random.getstate() if isinstance(made, HiddenSampler) else dict(vars(made))
    data = loader(made)
    assert loader_batch_size(data) == 6
    loader_order(data, seed=0)
    assert before == (made.random.getstate() if isinstance(made, HiddenSampler) else vars(made))
    expected = list(BatchSampler(HiddenSampler(), 6, drop_last=False))
    if sampler is HiddenSampler:
        assert run_batches(data, epochs=1).ids == expected


def test_the_generator_of_a_sampler_keeps_its_seed() -> None:
    """The seed of the run is the seed of the generator, in a second call as well."""
    made = generator()
    before = made.get_state()
    for _ in range(2):
        run_batches(loader(WeightedRandomSampler([1.0] * SIZE, SIZE, generator=made)))
    assert torch.equal(made.get_state(), before)
    assert made.initial_seed() == 3


def test_another_generator_gives_another_order() -> None:
    def ids(seed: int) -> list[list[int]]:
        made = torch.Generator().manual_seed(seed)
        return run_batches(loader(WeightedRandomSampler([1.0] * SIZE, SIZE, generator=made)), epochs=1).ids

    assert ids(1) == ids(1) != ids(2)


class Adaptive(Sampler):
    """Its user changes `order` between epochs, as hard-example mining does."""

    def __init__(self) -> None:
        self.order = list(range(SIZE))

    def __len__(self) -> int:
        return SIZE

    def __iter__(self):
        return iter(self.order)


class Adapt(whet.Callback):
    def __init__(self, sampler: Adaptive) -> None:
        self.sampler = sampler

    def on_epoch_end(self, state) -> whet.Action:
        random.Random(state.epoch).shuffle(self.sampler.order)
        return whet.Action.NONE


def adaptive(folder: Path | None, **options: Any) -> Any:
    sampler = Adaptive()
    return run_batches(loader(sampler), run=folder, callbacks=[Adapt(sampler)], epochs=4, **options)


def test_a_sampler_that_changes_during_the_run_is_read_when_an_epoch_begins(tmp_path: Path) -> None:
    """A checkpoint at the end of an epoch must not draw the next one before a callback has changed the sampler."""
    without, saved = adaptive(None), adaptive(tmp_path / "run")
    assert len({tuple(map(tuple, without.ids[start : start + 4])) for start in range(0, 16, 4)}) == 4
    assert saved.ids == without.ids


def test_a_sampler_that_changes_during_the_run_is_named(tmp_path: Path) -> None:
    adaptive(tmp_path / "run", stop=10)
    resumed = adaptive(tmp_path / "run")
    assert "the order of Adaptive depends on more" in resumed.exactness
    # The epoch that was interrupted is complete all the same.
    assert resumed.ids[:2] == adaptive(None).ids[10:12]


@pytest.mark.parametrize(
    "keys", [["a", "b"], [(0, 32), (1, 32)], [0.5, 1.5], [torch.tensor([0, 1]), torch.tensor([2, 3])]]
)
def test_keys_that_are_no_indices_are_refused(keys: list) -> None:
    with pytest.raises(UsageError, match="integer indices"):
        run_batches(DataLoader(Samples(lambda key: X[0]), batch_size=2, sampler=keys))


@pytest.mark.parametrize("make", [list, np.array, torch.tensor, lambda order: iter(np.array(order)), tuple])
def test_indices_of_any_integer_type(make) -> None:
    class Typed(Sampler):
        def __len__(self) -> int:
            return 5

        def __iter__(self):
            return iter(make([4, 3, 2, 1, 0]))

    assert run_batches(loader(Typed()), epochs=1).ids == [[4, 3, 2, 1, 0]]


def test_a_sampler_that_holds_its_dataset_is_not_copied_with_it() -> None:
    class Large(type(PAIRS)):
        def __deepcopy__(self, memo):
            raise AssertionError("the dataset may be larger than the memory")

    class Holding(GlobalSampler):
        def __init__(self) -> None:
            self.anything = Large(PAIRS.make)

    assert loader_order(loader(Holding()), seed=0).inexact_reason is None
    order = loader_order(loader(Holding()), seed=0)
    list(order.batches(Position()))
    assert order.inexact_reason is None


# --- batches of varying sizes ----------------------------------------------------------------------------------------


def test_the_batch_size_of_a_batch_sampler_is_its_largest() -> None:
    assert loader_batch_size(DataLoader(TENSORS, batch_sampler=VaryingBatches())) == 9


def test_a_batch_that_is_larger_than_announced_is_not_split() -> None:
    class Announcing(VaryingBatches):
        batch_size = 2

    seen = run_batches(DataLoader(TENSORS, batch_sampler=Announcing()), epochs=1)
    assert [len(batch[0]) for batch in seen.batches] == [3, 7, 1, 9]


def test_a_split_of_later_batches_is_checked_with_the_first() -> None:
    """The first batch is smaller than a micro-batch, and the loss is no mean over samples."""
    model = torch.nn.Linear(3, 5)
    data = DataLoader(TENSORS, batch_sampler=VaryingBatches())
    with pytest.raises(UsageError, match="micro_batch=4 would change what is trained"):
        whet.train(
            model,
            data,
            loss=lambda batch: model(batch[0]).square().sum(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            overrides={"threads": 1, "micro_batch": 4},
            on_event=None,
        )


class Growing(Sampler):
    """A sampler that yields more indices in each epoch, and one that the data lacks in the end."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return 6 + 6 * self.epoch


def test_an_index_that_the_data_lacks_is_named() -> None:
    assert len(run_batches(loader(Growing()), epochs=3).ids) == 6
    with pytest.raises(
        UsageError, match=rf"index that the dataset does not have\n.*{SIZE + 3}; the dataset has {SIZE}"
    ):
        run_batches(loader(Growing()), epochs=4)


@pytest.mark.parametrize("stop", [4, 5])
def test_a_resume_in_an_epoch_that_is_longer_than_the_first_one(stop: int, tmp_path: Path) -> None:
    whole = run_batches(loader(Growing()), epochs=3).ids
    begun = run_batches(loader(Growing()), epochs=3, run=tmp_path / "run", stop=stop).ids
    assert [*begun, *run_batches(loader(Growing()), epochs=3, run=tmp_path / "run").ids] == whole


@pytest.mark.parametrize("drop_last", [False, True])
def test_negative_indices_count_from_the_end(drop_last: bool) -> None:
    order = loader_order(loader([-1, 0, -SIZE], drop_last=drop_last), seed=0)
    ids = [batch.ids.tolist() for batch in order.batches(Position())]
    assert ids == ([] if drop_last else [[SIZE - 1, 0, 0]])
