"""Recorded global batches with their samples, so that another process sees the same batches."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from whet.data.batch import DictBatch, GlobalBatch, MicroBatch, Position, map_field
from whet.data.columns import Columns, MakeData
from whet.data.source import AbstractSource
from whet.data.split import BatchSplitter, LengthMode, RankShare
from whet.device.abstract import AbstractDevice


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedBatches:
    """The first global batches of a source. The samples are in the batches, or in `columns` for tensors in memory."""

    batches: tuple[GlobalBatch, ...]
    columns: Columns | None = None
    """The rows of the batches, sorted by sample id."""
    make_data: MakeData = DictBatch
    pad_token_id: int | None = None

    def known_ids(self) -> np.ndarray:
        """Return the ids of the rows in `columns`."""
        return np.unique(np.concatenate([batch.ids for batch in self.batches]))


@final
class RecordedSource(AbstractSource):
    """A data source that yields recorded batches, and splits them like the source that they were recorded from."""

    is_in_memory = True

    def __init__(self, recorded: RecordedBatches, device: AbstractDevice, *, is_resident: bool) -> None:
        super().__init__(pad_token_id=recorded.pad_token_id)
        self._recorded = recorded
        self.num_batches = len(recorded.batches)
        self.num_samples = sum(len(batch) for batch in recorded.batches)
        self._ids = recorded.known_ids()
        self._splitter = None
        if recorded.columns is not None:
            columns: Mapping[str, Any] = recorded.columns
            if is_resident:
                columns = {name: map_field(name, column, device.put) for name, column in columns.items()}
            send = device.put_async if is_resident else lambda rows: rows
            self._splitter = BatchSplitter(
                dict(columns), send=send, is_on_device=is_resident, make_data=recorded.make_data
            )

    def batches(self, position: Position) -> Iterator[GlobalBatch]:
        assert position == Position(), "recorded batches start at the beginning of the data"
        return iter(self._recorded.batches)

    def split(
        self, batch: GlobalBatch, share: RankShare, *, micro_batch: int, length_mode: LengthMode
    ) -> Iterator[MicroBatch]:
        if self._splitter is None or batch.collated is not None:
            return super().split(batch, share, micro_batch=micro_batch, length_mode=length_mode)
        rows = np.searchsorted(self._ids, batch.ids)
        return self._splitter.micro_batches(rows, batch.ids, micro_batch=micro_batch, length_mode=length_mode)
