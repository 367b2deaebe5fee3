"""How does a position lie on the disk? Four cells in a byte, and everything else of it beside them."""

import numpy as np
from numpy.typing import NDArray

from whet.hex.board import Boards
from whet.hex.games import Samples

_SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8)
_UNPACKED = ((np.arange(256)[:, None] >> _SHIFTS) & 3).astype(np.int8)
"""The four cells of every byte."""


def row_type(size: int) -> np.dtype[np.void]:
    """One position: little-endian on every machine, without gaps."""
    return np.dtype(
        [
            ("board", "u1", (num_bytes(size),)),
            ("mover", "u1"),
            ("won", "u1"),
            ("move", "<i2"),
            ("game", "<u4"),
            ("ply", "<u2"),
        ]
    )


def num_bytes(size: int) -> int:
    """Of one packed board."""
    return -(-size * size // 4)


def pack_boards(boards: Boards) -> NDArray[np.uint8]:
    """(batch, size, size) as (batch, bytes)."""
    size = boards.shape[-1]
    cells = np.zeros((len(boards), 4 * num_bytes(size)), dtype=np.uint8)
    cells[:, : size * size] = boards.reshape(len(boards), size * size)
    return np.bitwise_or.reduce(cells.reshape(len(boards), num_bytes(size), 4) << _SHIFTS, axis=2)


def unpack_boards(packed: NDArray[np.uint8], *, size: int) -> Boards:
    """And back."""
    return _UNPACKED[packed].reshape(len(packed), 4 * num_bytes(size))[:, : size * size].reshape(-1, size, size)


def as_rows(samples: Samples) -> NDArray[np.void]:
    """What is written of samples."""
    rows = np.zeros(len(samples), dtype=row_type(samples.positions.size))
    rows["board"] = pack_boards(samples.positions.boards)
    rows["mover"] = samples.positions.movers
    rows["won"] = samples.results
    rows["move"], rows["game"], rows["ply"] = samples.moves, samples.games, samples.plies
    return rows
