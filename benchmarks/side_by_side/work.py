"""What all ways train: the same model with the same first weights, the same samples in the same order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class ForWhet:
    """The same training as whet's recipe has it."""

    model: nn.Module
    data: Any
    loss: Callable[[Any], Any]
    workload: Any
    outputs: Callable[[Any], Any] | None = None
    overrides: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Work:
    """`model(**batch)` gives a map with the mean loss, as models of transformers do."""

    model: nn.Module
    samples: Sequence[Any]
    """One epoch; the next one brings the same in the same order."""
    collate: Callable[[list[Any]], Batch]
    """Samples as a batch, as anyone would write it."""
    collate_fixed: Callable[[list[Any]], Batch] | None
    """The same with one shape for all batches; None where there is only one."""
    resident: Callable[[str], Callable[[int], Batch]]
    """For a device: from the number of a step to its batch, as one writes it who knows that all data fits there."""
    for_whet: Callable[[], ForWhet]
    batch: int
    lr: float
    flops: float
    """Of the model in one step, on average: products of matrices, forward and backward, padding not counted."""
    words: str
    """What it is, in one line."""
    clip: float = 1.0
    is_image_like: bool = False
    """Convolutions: channels last is worth it in half precision."""

    @property
    def steps_per_epoch(self) -> int:
        return len(self.samples) // self.batch


class Repeated(Dataset[Any]):
    """So many steps of the same samples, in order."""

    def __init__(self, work: Work, *, total_steps: int) -> None:
        self._samples, self._length = work.samples, total_steps * work.batch

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._samples[index % len(self._samples)]


def resident_columns(columns: dict[str, Tensor], batch: int, device: str) -> Callable[[int], Batch]:
    """All columns lie on the device; a batch is a slice of each."""
    there = {name: column.to(device) for name, column in columns.items()}
    num_batches = len(next(iter(columns.values()))) // batch

    def batch_of(step: int) -> Batch:
        rows = slice(start := (step % num_batches) * batch, start + batch)
        return {name: column[rows] for name, column in there.items()}

    return batch_of
