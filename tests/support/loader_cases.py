"""Datasets, samplers, collate functions and DataLoaders that people bring."""

import collections
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
    random_split,
)

SIZE = 20
X = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(3))
Y = torch.randint(0, 5, (SIZE,), generator=torch.Generator().manual_seed(3))
TENSORS = TensorDataset(X, Y)


class Samples(Dataset):
    """A map-style dataset whose samples a function makes."""

    def __init__(self, make: Callable[[int], Any], size: int = SIZE) -> None:
        self.make, self.size = make, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def pair(index: int) -> tuple[Tensor, int]:
    return X[index], int(Y[index])


PAIRS = Samples(pair)
Labelled = collections.namedtuple("Labelled", "image label")


@dataclasses.dataclass
class Item:
    image: Any
    label: Any


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


# --- samplers --------------------------------------------------------------------------------------------------------


class EpochSampler(Sampler):
    """An order that `set_epoch` decides."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class GlobalSampler(Sampler):
    """Draws from torch's global generator."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE).tolist())


class HiddenSampler(Sampler):
    """Has a generator of its own that nobody saves."""

    def __init__(self) -> None:
        self.random = random.Random(1)

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(SIZE), SIZE))


class StreamSampler(Sampler):
    """Saves its position and its epoch; it has no length."""

    def __init__(self) -> None:
        self.at = self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.epoch).sample(range(SIZE), SIZE)
        while self.at < SIZE:
            self.at += 1
            yield order[self.at - 1]
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class StateSampler(StreamSampler):
    """Saves its position and its epoch, and has a length."""

    def __len__(self) -> int:
        return SIZE


class EndlessSampler(Sampler):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(SIZE).tolist()


class VaryingBatches(Sampler):
    """Batches of 3, 7, 1 and 9 samples."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SIZE).tolist()
        yield from (order[:3], order[3:10], order[10:11], order[11:])


# --- collate functions and datasets ----------------------------------------------------------------------------------


def mixup(samples: list[Any]) -> dict[str, Tensor]:
    x, y = default_collate(samples)
    share = np.random.beta(1, 1) * random.random()
    return {"x": share * x + (1 - share) * x[torch.randperm(len(x))], "y": y}


class HiddenCollate:
    """Has a generator of its own that nobody saves."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __call__(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return x + self.random.normal(), y


class HiddenDataset(Dataset):
    """Has a generator of its own that nobody saves."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return X[index] + self.random.normal(), Y[index]


class Stream(IterableDataset):
    """Divides itself between the workers of a DataLoader."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        for index in range(SIZE):
            if worker is None or index % worker.num_workers == worker.id:
                yield X[index], Y[index]


class RandomStream(IterableDataset):
    """Draws its order and some noise from torch's generator."""

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(SIZE).tolist():
            yield X[index] + torch.randn(()), Y[index]


def stacked(samples: list[Any]) -> Any:
    return torch.stack([x for x, _ in samples]), [y for _, y in samples]


def _loader(data: Any = PAIRS, batch_size: int = 6, **options: Any) -> Callable[[], DataLoader]:
    return lambda: DataLoader(data, batch_size=batch_size, **options)


LOADERS: dict[str, Callable[[], DataLoader]] = {
    "sequential": _loader(TENSORS),
    "shuffled": _loader(TENSORS, shuffle=True),
    "read one by one": _loader(shuffle=True),
    "drop_last": _loader(TENSORS, shuffle=True, drop_last=True),
    "a last batch of 1": _loader(batch_size=19, shuffle=True),
    "batches of 2": _loader(TENSORS, batch_size=2, shuffle=True),
    "batches of 1": _loader(batch_size=1),
    "less than a batch": lambda: DataLoader(Subset(TENSORS, range(5)), batch_size=8),
    "a generator": lambda: DataLoader(PAIRS, batch_size=6, shuffle=True, generator=generator()),
    "SequentialSampler of other data": _loader(TENSORS, sampler=SequentialSampler(range(10))),
    "RandomSampler of other data": _loader(TENSORS, sampler=RandomSampler(range(10))),
    "RandomSampler with replacement": _loader(sampler=RandomSampler(PAIRS, replacement=True, num_samples=33)),
    "RandomSampler of fewer samples": _loader(sampler=RandomSampler(PAIRS, num_samples=9)),
    "RandomSampler of more samples": _loader(sampler=RandomSampler(PAIRS, num_samples=45)),
    "WeightedRandomSampler": _loader(TENSORS, sampler=WeightedRandomSampler([1.0, 2.0] * 10, 17)),
    "WeightedRandomSampler with a generator": lambda: DataLoader(
        TENSORS, batch_size=6, sampler=WeightedRandomSampler([1.0, 2.0] * 10, 17, generator=generator())
    ),
    "SubsetRandomSampler": _loader(TENSORS, sampler=SubsetRandomSampler(range(4, 17))),
    "DistributedSampler": lambda: DataLoader(
        TENSORS, batch_size=6, sampler=DistributedSampler(TENSORS, num_replicas=1, rank=0)
    ),
    "a sampler with set_epoch": lambda: DataLoader(TENSORS, batch_size=6, sampler=EpochSampler()),
    "a sampler of the global generator": lambda: DataLoader(TENSORS, batch_size=6, sampler=GlobalSampler()),
    "a sampler with a state": lambda: DataLoader(TENSORS, batch_size=6, sampler=StateSampler()),
    "a sampler with a state and no length": lambda: DataLoader(TENSORS, batch_size=6, sampler=StreamSampler()),
    "a list as a sampler": _loader(TENSORS, sampler=[3, 1, 2, 5, 8, 9, 0]),
    "a list as a batch sampler": lambda: DataLoader(TENSORS, batch_sampler=[[3, 1], [2, 5, 8], [9, 0]]),
    "a batch sampler": lambda: DataLoader(PAIRS, batch_sampler=BatchSampler(RandomSampler(PAIRS), 6, drop_last=True)),
    "batches of varying sizes": lambda: DataLoader(TENSORS, batch_sampler=VaryingBatches()),
    "a collate function": _loader(collate_fn=stacked),
    "a lambda": _loader(collate_fn=lambda samples: stacked(samples)[0]),
    "samples as they are": _loader(collate_fn=lambda samples: samples),
    "arrays of NumPy": _loader(collate_fn=lambda samples: np.stack([x.numpy() for x, _ in samples])),
    "num_workers": _loader(shuffle=True, num_workers=2, persistent_workers=True, timeout=5, prefetch_factor=3),
    "ConcatDataset": _loader(ConcatDataset([PAIRS, Samples(pair, 7)]), shuffle=True),
    "random_split": lambda: DataLoader(random_split(TENSORS, [15, 5], generator())[0], batch_size=6, shuffle=True),
    "a Subset of a Subset": _loader(Subset(Subset(TENSORS, list(range(10, 20))), [5, 2, 3, -1]), batch_size=2),
    "dicts": _loader(Samples(lambda i: {"x": X[i], "name": str(i), "nested": {"numbers": [i, i + 1]}})),
    "named tuples": _loader(Samples(lambda i: Labelled(X[i], i))),
    "dataclasses": _loader(
        Samples(lambda i: Item(X[i], i)),
        collate_fn=lambda items: Item(torch.stack([i.image for i in items]), [i.label for i in items]),
    ),
    "strings": _loader(Samples(lambda i: "word " * i)),
    "None": _loader(Samples(lambda i: (X[i], None)), collate_fn=stacked),
    "PackedSequence": _loader(
        Samples(lambda i: torch.arange(1.0 + i % 5)), collate_fn=lambda s: pack_sequence(s, enforce_sorted=False)
    ),
    "NumPy scalars": _loader(Samples(lambda i: (np.float64(i), np.int32(i), np.bool_(i % 2), np.arange(3.0)))),
    "float64": _loader(TensorDataset(X.double(), Y)),
    "floats": _loader(Samples(lambda i: (X[i], 0.5 * i))),
    "NaN": _loader(TensorDataset(X.index_fill(0, torch.tensor([3]), float("nan")), Y)),
}
"""Loaders whose batches depend on the indices of their samples only."""

RANDOM_LOADERS: dict[str, Callable[[], DataLoader]] = {
    "augmented samples": _loader(Samples(lambda i: X[i] + torch.randn(()) + np.random.rand() + random.random())),
    "repeated augmented samples": _loader(
        Samples(lambda i: X[i] + torch.randn(())), sampler=RandomSampler(PAIRS, replacement=True, num_samples=33)
    ),
    "a collate function that mixes": _loader(shuffle=True, collate_fn=mixup),
}
"""Loaders that draw random numbers from global generators."""

HIDDEN_LOADERS: dict[str, Callable[[], DataLoader]] = {
    "HiddenSampler": lambda: DataLoader(TENSORS, batch_size=6, sampler=HiddenSampler()),
    "the dataset": lambda: DataLoader(HiddenDataset(), batch_size=6),
    "the collate function": lambda: DataLoader(PAIRS, batch_size=6, collate_fn=HiddenCollate()),
}
"""Loaders with a state that nobody saves, by what the run must name."""

STREAM_LOADERS: dict[str, Callable[[], DataLoader]] = {
    "in this process": lambda: DataLoader(Stream(), batch_size=6),
    "divided between workers": lambda: DataLoader(Stream(), batch_size=6, num_workers=2),
    "random": lambda: DataLoader(RandomStream(), batch_size=6),
    "random, in workers": lambda: DataLoader(RandomStream(), batch_size=6, num_workers=2, generator=generator()),
    "ChainDataset": lambda: DataLoader(ChainDataset([Stream(), Stream()]), batch_size=6, drop_last=True),
}
