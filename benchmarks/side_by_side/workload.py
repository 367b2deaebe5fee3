"""The workload of a comparison: same model, same initial weights, same samples in the same order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class ForWhet:
    """The same training in the form of whet's recipe."""

    model: nn.Module
    data: Any
    loss: Callable[[Any], Any]
    workload: Any
    outputs: Callable[[Any], Any] | None = None
    overrides: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class PeerWorkload:
    """A model and its data; `model(**batch)` returns a dict with the mean loss, like Transformers models."""

    model: nn.Module
    samples: Sequence[Any]
    """One epoch; every epoch has the same samples in the same order."""
    collate: Callable[[list[Any]], Batch]
    """An ordinary collate function."""
    collate_fixed: Callable[[list[Any]], Batch] | None
    """The same with one shape for all batches; None if there is only one."""
    resident: Callable[[str], Callable[[int], Batch]]
    """For a device: a function from the step to its batch, with all data resident on the device."""
    for_whet: Callable[[], ForWhet]
    batch: int
    lr: float
    flops: float
    """Mean matmul FLOPs of a step, forward and backward, without padding."""
    description: str
    """One line for the report."""
    clip: float = 1.0
    is_image_like: bool = False
    """Convolutional: channels_last is faster in half precision."""

    @property
    def steps_per_epoch(self) -> int:
        return len(self.samples) // self.batch


class Repeated(Dataset[Any]):
    """The samples repeated in order for a number of steps."""

    def __init__(self, workload: PeerWorkload, *, total_steps: int) -> None:
        self._samples, self._length = workload.samples, total_steps * workload.batch

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._samples[index % len(self._samples)]


def resident_columns(columns: dict[str, Tensor], batch: int, device: str) -> Callable[[int], Batch]:
    """Put all columns on the device; a batch is a slice of each."""
    there = {name: column.to(device) for name, column in columns.items()}
    num_batches = len(next(iter(columns.values()))) // batch

    def batch_of(step: int) -> Batch:
        rows = slice(start := (step % num_batches) * batch, start + batch)
        return {name: column[rows] for name, column in there.items()}

    return batch_of
