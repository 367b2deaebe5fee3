"""Files of sharded tensors: each rank writes its rows to one file, and any number of ranks can read them.

The manifest determines the exact layout of every file, and every piece has a hash, so a rank reads and verifies only
the pieces that contain its rows.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from whet.base.model import FrozenModel
from whet.checkpoint.encoding import DTYPES, FileLayout, TensorSlot, dtype_name, encode_tensors, layout_slots
from whet.checkpoint.manifest import (
    CheckpointManifest,
    FileDigest,
    ShardedTensor,
    Size,
    TensorPiece,
    check_hash,
    open_verified,
    read_exactly,
    role_of,
)
from whet.distributed.strategies import RowRange
from whet.run import durable

WantedRows = Callable[[str, tuple[int, ...]], RowRange | None]
"""Maps the name and full shape of a tensor to the rows that this rank needs, or to None for all rows."""


def all_rows(_name: str, _shape: tuple[int, ...]) -> RowRange | None:
    """A `WantedRows` function that selects all rows of every tensor."""
    return None


class HeldRows(FrozenModel):
    """The range of rows of one tensor that a shard contains."""

    dtype: str
    shape: tuple[Size, ...]
    """Shape of the full tensor."""
    start: Size
    stop: Size
    sha256: str | None
    """SHA-256 of the rows, or None if there are no rows."""


class Shard(FrozenModel):
    """The file that one rank wrote, and the rows in it."""

    file: FileDigest | None
    """Size and hash of the file, or None for a rank without rows."""
    held: dict[str, HeldRows]


def shard_name(rank: int) -> str:
    """Return the file name of a rank's shard."""
    return f"shard-{rank:04d}.safetensors"


# --- writing ---------------------------------------------------------------------------------------------------------


def write_shard(draft: Path, tensors: Mapping[str, Tensor], rows: Mapping[str, RowRange], *, rank: int) -> Shard:
    """Write the rows of this rank to a file and sync it. A rank without rows writes no file."""
    mine = {name: tensors[name] for name, held in rows.items() if held.count}
    digests: dict[str, str] = {}
    written: FileDigest | None = None
    if mine:
        data = durable.write_draft(draft / shard_name(rank), data=encode_tensors(mine, digests=digests))
        written = FileDigest(size=data.size, sha256=data.sha256)
    held = {
        name: HeldRows(
            dtype=dtype_name(tensors[name].dtype),
            shape=(part.total, *tensors[name].shape[1:]),
            start=part.start,
            stop=part.stop,
            sha256=digests.get(name),
        )
        for name, part in rows.items()
    }
    return Shard(file=written, held=held)


def merge_shards(shards: Sequence[Shard]) -> dict[str, ShardedTensor]:
    """Combine the shards of all ranks, in rank order, into the manifest's table of sharded tensors.

    Raise ValueError if rows are missing, duplicated or out of order.
    """
    table: dict[str, ShardedTensor] = {}
    for name in {name: None for shard in shards for name in shard.held}:
        held = [(rank, shard.held[name]) for rank, shard in enumerate(shards) if name in shard.held]
        kinds = {(part.dtype, part.shape) for _, part in held}
        (dtype, shape), *others = kinds
        # Each part must start where the previous one ends, and the last one must end at the last row.
        ends = [0, *(part.stop for _, part in held)]
        if others or len(held) != len(shards) or [*(part.start for _, part in held), shape[0]] != ends:
            rows = ", ".join(f"{part.start}-{part.stop} of {part.shape[0]}" for _, part in held)
            raise ValueError(f"{name!r} has rows {rows}, which are not all rows once")
        table[name] = ShardedTensor(
            dtype=dtype,
            shape=shape,
            role=role_of(name),
            pieces=tuple(
                TensorPiece(file=shard_name(rank), start=part.start, stop=part.stop, sha256=part.sha256)
                for rank, part in held
                if part.sha256 is not None
            ),
        )
    return table


# --- reading ---------------------------------------------------------------------------------------------------------


def shard_files(manifest: CheckpointManifest) -> set[str]:
    """Return the names of the files that contain rows of sharded tensors."""
    return {piece.file for tensor in manifest.sharded.values() for piece in tensor.pieces}


def read_rows(
    path: Path, manifest: CheckpointManifest, wanted: WantedRows
) -> tuple[dict[str, Tensor], dict[str, RowRange]]:
    """Read and verify the wanted rows of all sharded tensors.

    Return the tensors, and the row ranges of those that were read only in part.
    """
    layouts = {name: _checked_layout(manifest, name) for name in sorted(shard_files(manifest))}
    tensors: dict[str, Tensor] = {}
    rows: dict[str, RowRange] = {}
    parts: dict[str, list[tuple[str, TensorPiece, RowRange]]] = {name: [] for name in layouts}
    for name, tensor in manifest.sharded.items():
        requested = wanted(name, tensor.shape)
        part = RowRange(0, tensor.shape[0], tensor.shape[0]) if requested is None else requested
        if not 0 <= part.start <= part.stop <= part.total or part.total != tensor.shape[0]:
            raise ValueError(f"{name!r} has {tensor.shape[0]} rows; {part} are wanted")
        tensors[name] = torch.empty((part.count, *tensor.shape[1:]), dtype=DTYPES[tensor.dtype])
        if requested is not None:
            rows[name] = requested
        for piece in tensor.pieces:
            # Read every piece that overlaps the wanted rows. The number of ranks may have changed since the save.
            if piece.start < part.stop and part.start < piece.stop:
                parts[piece.file].append((name, piece, part))
    for file_name, needed in parts.items():
        if needed:
            _read_pieces(path / file_name, manifest.files[file_name], layouts[file_name], needed, into=tensors)
    return tensors, rows


def _checked_layout(manifest: CheckpointManifest, file_name: str) -> FileLayout:
    """Return the layout that the manifest implies for a file. Raise ValueError if it does not match the file size."""
    kinds = {
        name: (DTYPES[tensor.dtype], (piece.stop - piece.start, *tensor.shape[1:]))
        for name, tensor in manifest.sharded.items()
        for piece in tensor.pieces
        if piece.file == file_name
    }
    layout = layout_slots(kinds)
    if len(layout.header()) + layout.num_bytes != manifest.files[file_name].size:
        raise ValueError(f"{file_name} does not hold the tensors of the manifest")
    return layout


def _read_pieces(
    path: Path,
    expected: FileDigest,
    layout: FileLayout,
    needed: list[tuple[str, TensorPiece, RowRange]],
    *,
    into: dict[str, Tensor],
) -> None:
    header = layout.header()
    with open_verified(path, expected=expected) as file:
        if read_exactly(file, len(header), path=path) != header:
            raise ValueError(f"{path.name} has a different header than the manifest implies")
        # Read in file order, so that disk access is sequential.
        for name, piece, part in sorted(needed, key=lambda item: layout.slots[item[0]].start):
            slot = layout.slots[name]
            file.seek(len(header) + slot.start)
            data = read_exactly(file, slot.end - slot.start, path=path)
            check_hash(data, piece.sha256, path=path)
            if data:
                _copy(data, slot, piece, part, into=into[name])


def _copy(data: bytearray, slot: TensorSlot, piece: TensorPiece, part: RowRange, *, into: Tensor) -> None:
    first, last = max(piece.start, part.start), min(piece.stop, part.stop)
    rows = torch.frombuffer(data, dtype=slot.dtype).reshape(slot.shape)
    into[first - part.start : last - part.start] = rows[first - piece.start : last - piece.start]
