"""DataLoaders: the loss sees the batches that the loader itself would make, in a run that was killed too."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

import whet
from loader_cases import (
    HIDDEN_LOADERS,
    LOADERS,
    PAIRS,
    RANDOM_LOADERS,
    STREAM_LOADERS,
    TENSORS,
    Samples,
    Stream,
    X,
    Y,
)
from loader_runs import SimulatedKillError, differences, expected_batches, resumed_batches, run_batches
from whet.base.errors import UsageError, WhetError
from whet.data.sample import BadSampleError
from whet.run.events import read_events
from whet.run.folder import open_run
from whet.training.restore import CUSTOM_LOOP

pytestmark = pytest.mark.torch


def assert_same_batches(ours, theirs) -> None:
    assert len(ours) == len(theirs)
    found = [differences(a, b, f"step {step}") for step, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1)]
    assert not any(found), next(filter(None, found))


IN_GATE = (
    "shuffled",
    "a generator",
    "RandomSampler with replacement",
    "WeightedRandomSampler with a generator",
    "a sampler with set_epoch",
    "a sampler of the global generator",
    "a sampler with a state and no length",
    "a batch sampler",
    "batches of varying sizes",
    "num_workers",
    "ConcatDataset",
    "dataclasses",
    "NaN",
    *RANDOM_LOADERS,
)
"""One of each kind for the tests with a kill or workers; all are read in the gate in this process."""


def slow_but(names, chosen):
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", LOADERS)
def test_the_loss_sees_the_batches_of_the_loader(name: str) -> None:
    loader = LOADERS[name]()
    seen = run_batches(loader, epochs=2)
    if hasattr(loader.sampler, "__len__"):
        assert len(seen.batches) == 2 * len(loader)
    assert_same_batches(seen.batches, expected_batches(loader, seen.ids))


@pytest.mark.parametrize("name", ["sequential", "drop_last", "a list as a sampler", "a list as a batch sampler"])
def test_a_fixed_order_is_the_loaders_own(name: str) -> None:
    loader = LOADERS[name]() if name != "drop_last" else DataLoader(TENSORS, batch_size=6, drop_last=True)
    assert_same_batches(run_batches(loader, epochs=2).batches, [*loader, *loader])


@pytest.mark.parametrize("kill", [4, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_but([*LOADERS, *RANDOM_LOADERS], IN_GATE))
def test_a_killed_run_sees_the_same_batches(name: str, kill: int, memory_folder: Path) -> None:
    make = {**LOADERS, **RANDOM_LOADERS}[name]
    whole = run_batches(make(), epochs=3)
    kill = min(kill, len(whole.batches))
    resumed = resumed_batches(make, memory_folder / "run", kill=kill, epochs=3)
    saved = (kill - 1) // 2 * 2
    assert_same_batches(resumed.batches, whole.batches[saved:])
    assert torch.equal(resumed.weights, whole.weights)
    assert resumed.exactness.startswith(CUSTOM_LOOP)


@pytest.mark.parametrize("name", slow_but([*LOADERS, *RANDOM_LOADERS], (*IN_GATE, "PackedSequence", "strings")))
def test_workers_read_the_same_batches(name: str) -> None:
    make = {**LOADERS, **RANDOM_LOADERS}[name]
    here, workers = run_batches(make()), run_batches(make(), workers=2)
    assert_same_batches(workers.batches, here.batches)
    assert torch.equal(workers.weights, here.weights)


# Objects with a state that a second run of the same object could find.
STATEFUL = [
    "a generator",
    "WeightedRandomSampler with a generator",
    "a sampler with set_epoch",
    "a sampler with a state",
    "a sampler with a state and no length",
]


@pytest.mark.parametrize("name", slow_but(LOADERS, STATEFUL))
def test_the_same_loader_object_resumes(name: str, tmp_path: Path) -> None:
    loader = LOADERS[name]()
    whole = run_batches(LOADERS[name]())
    run_batches(loader, run=tmp_path / "run", stop=1)
    resumed = run_batches(loader, run=tmp_path / "run")
    assert_same_batches(resumed.batches, whole.batches[1:])
    assert torch.equal(resumed.weights, whole.weights)


@pytest.mark.parametrize("what", HIDDEN_LOADERS)
def test_a_state_that_nobody_saves_is_named(what: str, tmp_path: Path) -> None:
    make = HIDDEN_LOADERS[what]
    whole = run_batches(make())
    resumed = resumed_batches(make, tmp_path / "run", kill=4)
    assert not torch.equal(resumed.weights, whole.weights), "otherwise the message below would be wrong"
    assert "not bit-exact" in resumed.exactness
    assert what in resumed.exactness


def test_a_process_that_is_killed_sees_the_same_batches(tmp_path: Path) -> None:
    whole = run_batches(RANDOM_LOADERS["a collate function that mixes"](), epochs=3)
    child = os.fork()
    if child == 0:
        try:
            run_batches(
                RANDOM_LOADERS["a collate function that mixes"](),
                run=tmp_path / "run",
                epochs=3,
                callbacks=[KillAt(7)],
                workers=2,
            )
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    resumed = run_batches(RANDOM_LOADERS["a collate function that mixes"](), run=tmp_path / "run", epochs=3, workers=2)
    assert 5 <= len(resumed.batches) < 12
    assert torch.equal(resumed.weights, whole.weights)
    assert resumed.exactness.startswith(CUSTOM_LOOP)


class KillAt(whet.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, state, outcome) -> whet.Action:
        if state.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)
        return whet.Action.NONE


@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    kill=st.integers(1, 30),
    replacement=st.none() | st.integers(1, 50),
)
def test_any_size_of_batches(
    size: int, batch_size: int, drop_last: bool, shuffle: bool, kill: int, replacement: int | None
) -> None:
    """The steps are those of the loader, every epoch is complete, and a position continues it."""
    from whet.data.adapters import open_source
    from whet.data.batch import Position
    from whet.device.cpu import CpuDevice

    data = TensorDataset(torch.arange(size))
    sampler = None if replacement is None else RandomSampler(data, replacement=True, num_samples=replacement)
    order = {"shuffle": shuffle} if sampler is None else {"sampler": sampler}
    loader = DataLoader(data, batch_size=batch_size, drop_last=drop_last, **order)
    source = open_source(loader, CpuDevice(), global_batch_size=batch_size, seed=kill)
    batches = list(source.batches(Position()))
    assert len(batches) == len(loader) == source.num_batches
    ids = [number for batch in batches for number in batch.ids.tolist()]
    if sampler is None:
        assert sorted(ids) == sorted(set(ids))
        assert drop_last or sorted(ids) == list(range(size))
    for batch, expected in zip(batches, DataLoader(data, batch_size=batch_size, sampler=ids), strict=True):
        (micro,) = source.micro_batches(batch, micro_batch=batch_size, length_mode="fixed")
        assert differences(micro.data, expected) is None
    if batches:
        cut = min(kill, len(batches)) - 1
        rest = list(source.batches(batches[cut].after))
        expected_ids = [batch.ids.tolist() for batch in batches[cut + 1 :]] or None
        assert expected_ids is None or [batch.ids.tolist() for batch in rest] == expected_ids


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("name", LOADERS)
def test_micro_batches_are_the_rows_of_the_batch(name: str, micro_batch: int) -> None:
    """Together they have every sample once, in order and in the type of the batch; or the batch stays whole."""
    from whet.data.adapters import open_source
    from whet.data.batch import Position
    from whet.data.structure import select_rows
    from whet.device.cpu import CpuDevice

    loader = LOADERS[name]()
    source = open_source(loader, CpuDevice(), global_batch_size=6, seed=0)
    for batch in source.batches(Position()):
        (whole,) = expected_batches(loader, [batch.ids.tolist()])
        parts = list(source.micro_batches(batch, micro_batch=micro_batch, length_mode="fixed"))
        assert [number for part in parts for number in part.ids] == batch.ids.tolist()
        if len(parts) == 1:
            assert differences(parts[0].data, whole) is None
            continue
        for number, part in enumerate(parts):
            rows = slice(number * micro_batch, (number + 1) * micro_batch)
            if source.split_obstacle(batch) is None and batch.collated is not None:
                expected = select_rows(whole, rows, len(batch))
            else:
                expected = [tensor[rows] for tensor in whole]
            assert differences(part.data, expected) is None


@pytest.mark.parametrize(
    ("name", "is_rereadable"), [("shuffled", True), ("WeightedRandomSampler", True), ("a sampler with a state", False)]
)
def test_measuring_does_not_read_from_a_sampler_with_a_state(name: str, is_rereadable: bool) -> None:
    from whet.training.run_config import is_rereadable as decided

    assert decided(LOADERS[name]()) is is_rereadable
    assert not decided(STREAM_LOADERS["random"]())


# --- options of the loader -------------------------------------------------------------------------------------------


class OwnIteration(DataLoader):
    def __iter__(self):
        for x, y in super().__iter__():
            yield x * 100, y


def test_a_loader_with_own_iteration_is_iterated(tmp_path: Path) -> None:
    seen = run_batches(OwnIteration(TENSORS, batch_size=6), epochs=1)
    assert_same_batches(seen.batches, list(OwnIteration(TENSORS, batch_size=6)))
    resumed = resumed_batches(lambda: OwnIteration(TENSORS, batch_size=6, shuffle=True), tmp_path / "run", kill=4)
    assert "not bit-exact" in resumed.exactness
    whole = run_batches(OwnIteration(TENSORS, batch_size=6, shuffle=True))
    assert torch.equal(resumed.weights, whole.weights)


class Opened(Samples):
    """Needs its worker_init_fn, as a dataset that opens a file in each worker does."""

    scale = None

    def __getitem__(self, index: int):
        return X[index] * self.scale, Y[index]


def open_dataset(number: int) -> None:
    worker = get_worker_info()
    assert worker.id == number < worker.num_workers
    worker.dataset.scale = 2.0
    np.random.seed(worker.seed % 2**32)


@pytest.mark.parametrize("workers", [0, 2])
def test_worker_init_fn_prepares_the_dataset(workers: int) -> None:
    loader = DataLoader(Opened(len), batch_size=6, num_workers=2, worker_init_fn=open_dataset)
    seen = run_batches(loader, workers=workers, epochs=1)
    assert_same_batches(seen.batches, [[x * 2, y] for x, y in DataLoader(TENSORS, batch_size=6)])
    assert get_worker_info() is None


@pytest.mark.parametrize("workers", [0, 1])
def test_a_worker_init_fn_that_fails_is_named(workers: int) -> None:
    def fail(number: int) -> None:
        raise OSError("no such file: data.h5")

    loader = DataLoader(PAIRS, batch_size=6, num_workers=2, worker_init_fn=fail)
    with pytest.raises(BadSampleError, match=r"worker_init_fn failed\n.*no such file"):
        run_batches(loader, workers=workers)


def test_without_workers_worker_init_fn_is_not_called() -> None:
    def fail(number: int) -> None:
        raise AssertionError

    run_batches(DataLoader(PAIRS, batch_size=6, worker_init_fn=fail))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_collate_function_keeps_its_message(workers: int) -> None:
    def fail(samples):
        raise WhetError("too few samples", got="6", try_="more")

    with pytest.raises(WhetError, match="too few samples"):
        run_batches(DataLoader(PAIRS, batch_size=6, collate_fn=fail), workers=workers)


def test_a_batch_that_cannot_be_sent_is_named() -> None:
    loader = DataLoader(PAIRS, batch_size=6, collate_fn=lambda samples: (sample for sample in samples))
    with pytest.raises(BadSampleError, match=r"cannot be sent from a worker\n.*generator"):
        run_batches(loader, workers=1)


def test_an_unpicklable_collate_fn_with_spawned_workers_is_an_error(tmp_path: Path) -> None:
    loader = DataLoader(PAIRS, batch_size=6, collate_fn=lambda samples: default_collate(samples))
    with pytest.raises(UsageError, match="cannot be sent to workers"):
        run_batches(loader, workers=1, overrides={"worker_start_method": "spawn"}, run=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_workers_keep_the_memory_format() -> None:
    """Kernels may round differently for channels_last."""

    def collate(images):
        return torch.stack(images).to(memory_format=torch.channels_last)

    loader = DataLoader(Samples(lambda i: torch.ones(3, 4, 5) * i), batch_size=6, collate_fn=collate)
    here, worker = (run_batches(loader, workers=workers, epochs=1).batches for workers in (0, 1))
    assert [batch.stride() for batch in worker] == [batch.stride() for batch in here]
    assert here[0].stride() != torch.empty(6, 3, 4, 5).stride()
    assert_same_batches(worker, here)


TOO_FEW = "no full batch\n  got: 3 samples, batch_size=6, drop_last=True\n  try: drop_last=False or batch_size=3"


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: DataLoader(Subset(TENSORS, []), batch_size=6), "is empty\n  got: a DataLoader over 0 samples"),
        (lambda: DataLoader(Samples(len, 0), batch_size=6), "is empty\n  got: a DataLoader over 0 samples"),
        (lambda: DataLoader(Subset(TENSORS, range(3)), batch_size=6, drop_last=True), TOO_FEW),
        (lambda: DataLoader(Samples(len, 3), batch_size=6, drop_last=True), TOO_FEW),
        (
            lambda: DataLoader(TENSORS, 6, sampler=WeightedRandomSampler([1.0] * 9, num_samples=3), drop_last=True),
            TOO_FEW,
        ),
        (lambda: DataLoader(Nothing(), batch_size=6), "the data is empty"),
        (lambda: DataLoader(Stream(), batch_size=6, collate_fn=lambda samples: None), "returned no batch"),
        (lambda: DataLoader(PAIRS, batch_size=6, collate_fn=lambda samples: None), "returned nothing"),
        (lambda: DataLoader((pair for pair in ()), batch_size=6), r"has no length\n.*DataLoader\(generator\)"),
        (lambda: DataLoader(PAIRS, batch_size=None), "batch size of the DataLoader is unknown"),
        (
            lambda: DataLoader(PAIRS, batch_size=None, sampler=BatchSampler(RandomSampler(PAIRS), 4, drop_last=False)),
            "batch size of the DataLoader is unknown",
        ),
    ],
)
def test_a_loader_without_batches_is_refused(make, what: str, tmp_path: Path) -> None:
    with pytest.raises(WhetError, match=what) as caught:
        run_batches(make(), run=tmp_path / "run")
    assert isinstance(caught.value, BadSampleError) or not list(tmp_path.iterdir())


class Nothing(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize("options", [{"global_batch_size": 7}, {"shuffle": True}, {"collate_fn": default_collate}])
def test_an_option_that_contradicts_the_loader_is_refused(options: dict) -> None:
    with pytest.raises(UsageError, match="DataLoader"):
        run_batches(DataLoader(TENSORS, batch_size=6), **options)


# --- iterable datasets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", slow_but(STREAM_LOADERS, ("in this process", "random, in workers")))
def test_a_stream_has_the_batches_of_its_loader(name: str, tmp_path: Path) -> None:
    make = STREAM_LOADERS[name]
    whole = run_batches(make())
    if "random" not in name:
        assert_same_batches(whole.batches, [*make(), *make()])
    resumed = resumed_batches(make, tmp_path / "run", kill=4)
    # The order is repeated where it follows from the seed, but that cannot be known.
    assert_same_batches(resumed.batches, whole.batches[2:])
    assert torch.equal(resumed.weights, whole.weights)
    assert "a stream without a state" in resumed.exactness


def test_streams_do_not_move_the_draws_of_steps() -> None:
    """The same values, drawn and not drawn: the steps draw the same random numbers."""

    class Drawing(Stream):
        def __iter__(self):
            for sample in super().__iter__():
                torch.randn(3)
                yield sample

    quiet, drawing = (run_batches(DataLoader(data, batch_size=6)) for data in (Stream(), Drawing()))
    assert torch.equal(quiet.weights, drawing.weights)


# --- validation data -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: DataLoader(TENSORS, batch_size=6), marks=pytest.mark.slow),
        lambda: DataLoader(TENSORS, batch_size=7, shuffle=True, drop_last=False),
        pytest.param(
            lambda: DataLoader(PAIRS, batch_size=19, collate_fn=lambda s: tuple(default_collate(s))),
            marks=pytest.mark.slow,
        ),
        lambda: DataLoader(Stream(), batch_size=6, num_workers=2),
        pytest.param(lambda: DataLoader(PAIRS, batch_size=64), marks=pytest.mark.slow),
    ],
)
def test_a_loader_is_validation_data(make, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    result = whet.train(
        model,
        DataLoader(TENSORS, batch_size=6, shuffle=True),
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        val=make(),
        epochs=2,
        run=tmp_path / "run",
        on_event=None,
        overrides={"threads": 1, "workers": 0},
    )
    expected = nn.functional.cross_entropy(model(X), Y).item()
    assert result.metrics["val_loss"] == pytest.approx(expected, abs=1e-6)
    assert len(list(read_events(open_run(tmp_path / "run"), kinds=("eval",)))) == 2


def test_a_kill_is_simulated() -> None:
    with pytest.raises(SimulatedKillError):
        run_batches(DataLoader(TENSORS, batch_size=6), kill=2)
