"""How do the rows that a process holds get into a file of its own, and out again on any number of processes?

Every file is laid out as its manifest says, to the byte. So who needs some rows reads the pieces they lie in and
nothing else, and each piece has a hash of its own.
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
"""Which rows of a tensor, by its name and its whole shape, are needed here; None for all."""


def all_rows(_name: str, _shape: tuple[int, ...]) -> RowRange | None:
    """Of every tensor."""
    return None


class HeldRows(FrozenModel):
    """The rows of one tensor in one file."""

    dtype: str
    shape: tuple[Size, ...]
    """Of the whole."""
    start: Size
    stop: Size
    sha256: str | None
    """None for no rows."""


class Shard(FrozenModel):
    """What one process wrote."""

    file: FileDigest | None
    """None where it held nothing."""
    held: dict[str, HeldRows]


def shard_name(rank: int) -> str:
    """The file of one process."""
    return f"shard-{rank:04d}.safetensors"


# --- writing ---------------------------------------------------------------------------------------------------------


def write_shard(draft: Path, tensors: Mapping[str, Tensor], rows: Mapping[str, RowRange], *, rank: int) -> Shard:
    """Writes and syncs the rows that lie here; a process that holds none writes no file."""
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
    """The table of all tensors from what each process wrote, in the order of their ranks.

    ValueError where rows are missing, come twice or in another order.
    """
    table: dict[str, ShardedTensor] = {}
    for name in {name: None for shard in shards for name in shard.held}:
        held = [(rank, shard.held[name]) for rank, shard in enumerate(shards) if name in shard.held]
        kinds = {(part.dtype, part.shape) for _, part in held}
        (dtype, shape), *others = kinds
        ends = [0, *(part.stop for _, part in held)]
        if others or len(held) != len(shards) or [*(part.start for _, part in held), shape[0]] != ends:
            found = ", ".join(f"{part.start}-{part.stop} of {part.shape[0]}" for _, part in held)
            raise ValueError(f"{name!r} has rows {found}, and not all of them once")
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
    """The files that hold rows of shared tensors, and nothing else."""
    return {piece.file for tensor in manifest.sharded.values() for piece in tensor.pieces}


def read_rows(
    path: Path, manifest: CheckpointManifest, wanted: WantedRows
) -> tuple[dict[str, Tensor], dict[str, RowRange]]:
    """The shared tensors of a checkpoint, as many rows of each as are wanted; every byte that is read is checked."""
    layouts = {name: _checked_layout(manifest, name) for name in sorted(shard_files(manifest))}
    tensors: dict[str, Tensor] = {}
    rows: dict[str, RowRange] = {}
    parts: dict[str, list[tuple[str, TensorPiece, RowRange]]] = {name: [] for name in layouts}
    for name, tensor in manifest.sharded.items():
        asked = wanted(name, tensor.shape)
        part = RowRange(0, tensor.shape[0], tensor.shape[0]) if asked is None else asked
        if not 0 <= part.start <= part.stop <= part.total or part.total != tensor.shape[0]:
            raise ValueError(f"{name!r} has {tensor.shape[0]} rows; {part} are wanted")
        tensors[name] = torch.empty((part.count, *tensor.shape[1:]), dtype=DTYPES[tensor.dtype])
        if asked is not None:
            rows[name] = asked
        for piece in tensor.pieces:
            if piece.start < part.stop and part.start < piece.stop:
                parts[piece.file].append((name, piece, part))
    for file_name, needed in parts.items():
        if needed:
            _read_pieces(path / file_name, manifest.files[file_name], layouts[file_name], needed, into=tensors)
    return tensors, rows


def _checked_layout(manifest: CheckpointManifest, file_name: str) -> FileLayout:
    """How a file must look; its size tells before anything is read whether it can."""
    kinds = {
        name: (DTYPES[tensor.dtype], (piece.stop - piece.start, *tensor.shape[1:]))
        for name, tensor in manifest.sharded.items()
        for piece in tensor.pieces
        if piece.file == file_name
    }
    layout = layout_slots(kinds)
    if len(layout.header()) + layout.num_bytes != manifest.files[file_name].size:
        raise ValueError(f"{file_name} holds other tensors than the manifest says")
    return layout


def _read_pieces(
    path: Path,
    vouched: FileDigest,
    layout: FileLayout,
    needed: list[tuple[str, TensorPiece, RowRange]],
    *,
    into: dict[str, Tensor],
) -> None:
    header = layout.header()
    with open_verified(path, vouched=vouched) as file:
        if read_exactly(file, len(header), path=path) != header:
            raise ValueError(f"{path.name} does not begin as the manifest says")
        for name, piece, part in sorted(needed, key=lambda item: layout.places[item[0]].start):
            place = layout.places[name]
            file.seek(len(header) + place.start)
            data = read_exactly(file, place.end - place.start, path=path)
            check_hash(data, piece.sha256, path=path)
            if data:
                _copy(data, place, piece, part, into=into[name])


def _copy(data: bytearray, place: TensorSlot, piece: TensorPiece, part: RowRange, *, into: Tensor) -> None:
    first, last = max(piece.start, part.start), min(piece.stop, part.stop)
    found = torch.frombuffer(data, dtype=place.dtype).reshape(place.shape)
    into[first - part.start : last - part.start] = found[first - piece.start : last - piece.start]
