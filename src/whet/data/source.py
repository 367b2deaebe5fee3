"""The interface of data sources, which yield global batches from any position and split them into micro-batches."""

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
    """A source of global batches, which can start at any position, and of their micro-batches."""

    num_samples: int | None
    """Number of samples per epoch, or None if it is not known in advance."""
    num_batches: int | None
    """Number of global batches per epoch, or None if it is not known in advance."""
    num_dropped = 0
    """Number of samples per epoch that belong to no batch, because they do not fill one (drop_last)."""
    is_in_memory = False
    """Whether reading a batch takes no time."""

    def __init__(self, share: RankShare | None = None, *, pad_token_id: int | None = None) -> None:
        """Initialize the source for the `share` of each batch that this rank computes, by default all of it."""
        self.share = share or RankShare()
        self._pad_token_id = pad_token_id
        self._ragged: set[str] = set()

    @abstractmethod
    def batches(self, position: Position) -> Iterator[GlobalBatch]:
        """Yield the global batches of an epoch that remain after `position`."""

    def micro_batches(self, batch: GlobalBatch, *, micro_batch: int, length_mode: LengthMode) -> Iterator[MicroBatch]:
        """Split this rank's part of a global batch. The micro-batches are on the device if the data is."""
        return self.split(batch, self.share, micro_batch=micro_batch, length_mode=length_mode)

    def split(
        self, batch: GlobalBatch, share: RankShare, *, micro_batch: int, length_mode: LengthMode
    ) -> Iterator[MicroBatch]:
        """Split one rank's share of a global batch into micro-batches."""
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
        """Return a batch with only the samples of this rank."""
        # Collated batches and tensors in memory contain the samples of all ranks.
        return replace(batch, ids=batch.ids[self.share.of(len(batch)).indices]) if batch.samples else batch

    def split_obstacle(self, batch: GlobalBatch) -> str | None:
        """Return why a batch cannot be divided into samples, or None if it can be."""
        return None if batch.collated is None else row_obstacle(batch.collated, len(batch))

    def record(self, batches: Sequence[GlobalBatch]) -> "RecordedBatches":
        """Return these batches with their samples, for another process.

        Supported only for data that can be read twice.
        """
        raise NotImplementedError(type(self).__name__)

    def fingerprint(self) -> str | None:
        """Return a hash that identifies the data, or None if it is unknown. Large data is hashed only in part."""
        return None

    def inexact_reason(self) -> str | None:
        """Return why a resumed run may see different samples from an uninterrupted one, or None if it sees the same."""
        return None

    def state(self, position: Position) -> dict[str, Any]:  # noqa: ARG002
        """Return the state that a resume at `position` needs. A seeded order needs none."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned."""

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the events since the last call, as (kind, fields), for the run's log."""
        return []

    def close(self) -> None:
        """Stop the worker processes, if any."""
