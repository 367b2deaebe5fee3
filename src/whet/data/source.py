"""The interface of data sources: global batches from any position, and their micro-batches."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from whet.data.batch import GlobalBatch, MicroBatch, Position
from whet.data.split import LengthMode, RankShare, split_collated, split_samples
from whet.data.structure import row_obstacle

if TYPE_CHECKING:
    from whet.data.recorded import RecordedBatches


class AbstractSource(ABC):
    """A source of global batches, starting at any position, and of their micro-batches."""

    num_samples: int | None
    """Number of samples in one epoch, or None if it is not known in advance."""
    num_batches: int | None
    """Number of global batches in one epoch, or None if it is not known in advance."""
    is_in_memory = False
    """Whether batches take no time to read."""

    def __init__(self, share: RankShare | None = None, *, pad_token_id: int | None = None) -> None:
        """Compute `share` of each batch on this rank; all of it by default."""
        self.share = share or RankShare()
        self._pad_token_id = pad_token_id
        self._ragged: set[str] = set()

    @abstractmethod
    def batches(self, position: Position) -> Iterator[GlobalBatch]:
        """Yield the remaining global batches of the epoch at `position`."""

    def micro_batches(self, batch: GlobalBatch, *, micro_batch: int, length_mode: LengthMode) -> Iterator[MicroBatch]:
        """Split the part of a global batch for this rank. The micro-batches are on the device if the data is."""
        return self.split(batch, self.share, micro_batch=micro_batch, length_mode=length_mode)

    def split(
        self, batch: GlobalBatch, share: RankShare, *, micro_batch: int, length_mode: LengthMode
    ) -> Iterator[MicroBatch]:
        """Split a part of a global batch."""
        if batch.collated is not None:
            return split_collated(batch, micro_batch=micro_batch, share=share)
        return split_samples(
            batch,
            micro_batch=micro_batch,
            length_mode=length_mode,
            ragged=self._ragged,
            share=share,
            pad_token_id=self._pad_token_id,
        )

    def own_samples(self, batch: GlobalBatch) -> GlobalBatch:
        """Return the samples of a batch that this rank has, as a batch of its own."""
        # A collate function and tensors in memory have the samples of all ranks.
        return replace(batch, ids=batch.ids[self.share.of(len(batch)).indices]) if batch.samples else batch

    def split_obstacle(self, batch: GlobalBatch) -> str | None:
        """Return why a batch cannot be divided into samples, or None if it can."""
        return None if batch.collated is None else row_obstacle(batch.collated, len(batch))

    def record(self, batches: Sequence[GlobalBatch]) -> "RecordedBatches":
        """Return these batches with their samples, for another process. Only data that can be read twice has them."""
        raise NotImplementedError(type(self).__name__)

    def fingerprint(self) -> str | None:
        """Return a hash that identifies the data, or None if it is unknown. Large data is hashed in part."""
        return None

    def inexact_reason(self) -> str | None:
        """Return why a resumed run may see other samples than an uninterrupted one, or None if it sees the same."""
        return None

    def state(self, position: Position) -> dict[str, Any]:  # noqa: ARG002
        """Return what a resume at `position` needs. A seeded order needs nothing."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the events since the last call for the log of the run, as kinds and fields."""
        return []

    def close(self) -> None:
        """Stop worker processes, if there are any."""
