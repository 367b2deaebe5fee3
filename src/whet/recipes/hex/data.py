"""Which positions are learned from? As columns of tensors, each board as its mover sees it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whet.hex.board import Boards, Cells
from whet.hex.rules import Positions
from whet.hex.symmetry import mover_view, transform_moves

Columns = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class HexData:
    """Three parts of positions; no game is in two of them."""

    size: int
    train: Columns
    dev: Columns
    test: Columns
    fingerprint: str
    notes: tuple[str, ...] = ()


def columns(positions: Positions, moves: Cells, results: NDArray[np.int8]) -> Columns:
    """Positions with the move that was played there (-1: none) and the colour that won, as a net learns them."""
    seen, symmetry = mover_view(positions)
    return own_columns(seen.boards, transform_moves(moves, symmetry, size=positions.size), results == positions.movers)


def own_columns(boards: Boards, moves: Cells, wins: NDArray[Any]) -> Columns:
    """The same for boards as their movers see them, and whether the mover won."""
    return {
        "board": torch.from_numpy(np.ascontiguousarray(boards, dtype=np.int8)),
        "move": torch.from_numpy(np.ascontiguousarray(moves, dtype=np.int64)),
        "win": torch.from_numpy(np.ascontiguousarray(wins, dtype=np.float32)),
    }


def with_half_turns(given: Columns) -> Columns:
    """Every position as it is, and turned by 180 degrees: the symmetry that a mover's view leaves to be learned."""
    cells = given["board"][0].numel()
    turned = {"board": given["board"].flip((1, 2)), "win": given["win"]}
    turned["move"] = torch.where(given["move"] < 0, given["move"], cells - 1 - given["move"])
    if "shares" in given:
        turned["shares"] = given["shares"].flip(1)
    return {name: torch.cat((column, turned[name])) for name, column in given.items()}
