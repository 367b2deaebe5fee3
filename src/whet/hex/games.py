"""Many games at once: which of them were played by the rules, who won them, and all positions they went through."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whet.hex.board import BLUE, EMPTY, NO_MOVE, RED, SWAP, Boards, Cells
from whet.hex.connecting import winners
from whet.hex.rules import Colours, Positions

_AT_ONCE = 256
"""Games unrolled together: each of their positions takes a row of all its moves for a moment."""


@dataclass(frozen=True, slots=True)
class Games:
    """Games on boards of one size."""

    size: int
    moves: NDArray[np.int16]
    """(games, longest): cells, or SWAP as the second; NO_MOVE after the end."""
    winners: Colours
    """(games,): EMPTY where nobody knows."""

    def __len__(self) -> int:
        return len(self.moves)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(games,): how many moves each has."""
        return (self.moves != NO_MOVE).sum(axis=1)

    def take(self, index: "NDArray[np.int64] | NDArray[np.bool_] | slice") -> "Games":
        """Some of them."""
        return Games(self.size, self.moves[index], self.winners[index])

    def move_list(self, game: int) -> tuple[int, ...]:
        """The moves of one game."""
        return tuple(int(move) for move in self.moves[game] if move != NO_MOVE)


@dataclass(frozen=True, slots=True)
class Samples:
    """Positions with what was played there and who won: what a net learns from."""

    positions: Positions
    moves: Cells
    """(batch,): the cell that was played; NO_MOVE where the game is over (or red swapped): no target for a policy."""
    results: NDArray[np.float32]
    """(batch,): 1 where the mover won the game, 0 where the other did."""
    games: NDArray[np.int64]
    """(batch,): the number of the game."""
    plies: NDArray[np.int64]
    """(batch,): how many moves came before."""

    def __len__(self) -> int:
        return len(self.moves)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a replay of each game says."""

    is_legal: NDArray[np.bool_]
    """(games,): empty cells only, a swap only as the second move, and nobody had won before the last move."""
    winners: Colours
    """(games,): who has joined their edges at the end."""


def as_moves(lists: Sequence[Sequence[int]]) -> NDArray[np.int16]:
    """(games, longest): lists of moves, filled up with NO_MOVE."""
    longest = max((len(moves) for moves in lists), default=0)
    filled = np.full((len(lists), longest), NO_MOVE, dtype=np.int16)
    for row, moves in zip(filled, lists, strict=True):
        row[: len(moves)] = moves
    return filled


def judge(moves: NDArray[np.int16], *, size: int) -> Verdict:
    """Replays all games at once."""
    is_swap = moves == SWAP
    is_known = ((moves >= NO_MOVE) & (moves < size * size)) | is_swap
    is_known[:, :1] &= ~is_swap[:, :1]
    is_known[:, 2:] &= ~is_swap[:, 2:]
    is_legal = np.asarray(is_known.all(axis=1))
    moves = np.where(is_legal[:, None], moves, np.int16(NO_MOVE))
    lengths = (moves != NO_MOVE).sum(axis=1)
    at_end = _Stones.of(moves, lengths, size=size)
    in_order = np.sort(at_end.cells, axis=1)
    is_legal &= ~((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] != NO_MOVE)).any(axis=1)
    # Stones stay, so whoever had won earlier has won just before the last move as well.
    is_legal &= winners(_Stones.of(moves, lengths - 1, size=size).boards(size)) == EMPTY
    return Verdict(is_legal, np.where(is_legal, winners(at_end.boards(size)), np.int8(EMPTY)))


def unroll(games: Games, *, first_number: int = 0) -> Samples:
    """All positions of all games, game after game, the last one (where nothing is to be played) included."""
    parts = [_unroll(games.take(slice(at, at + _AT_ONCE)), first_number + at) for at in range(0, len(games), _AT_ONCE)]
    if len(parts) < 2:
        return parts[0] if parts else _unroll(games, first_number)
    return Samples(
        positions=Positions(
            np.concatenate([part.positions.boards for part in parts]),
            np.concatenate([part.positions.movers for part in parts]),
        ),
        moves=np.concatenate([part.moves for part in parts]),
        results=np.concatenate([part.results for part in parts]),
        games=np.concatenate([part.games for part in parts]),
        plies=np.concatenate([part.plies for part in parts]),
    )


def _unroll(games: Games, first_number: int) -> Samples:
    steps = games.lengths + 1
    game = np.repeat(np.arange(len(games)), steps)
    ply = np.arange(len(game)) - np.repeat(np.cumsum(steps) - steps, steps)
    boards = _Stones.of(games.moves[game], ply, size=games.size).boards(games.size)
    movers = np.where(ply % 2 == 0, BLUE, RED).astype(np.int8)
    after_the_end = np.full((len(games), 1), NO_MOVE, dtype=np.int16)
    played = np.concatenate([games.moves, after_the_end], axis=1)[game, ply].astype(np.int64)
    return Samples(
        positions=Positions(boards, movers),
        moves=np.where(played == SWAP, NO_MOVE, played),
        results=(games.winners[game] == movers).astype(np.float32),
        games=game + first_number,
        plies=ply,
    )


@dataclass(frozen=True, slots=True)
class _Stones:
    """What lies on the board after some moves."""

    cells: NDArray[np.int16]
    """(games, longest): where the stone of each move lies; NO_MOVE for those that are to come, and for a swap."""
    colours: NDArray[np.int8]

    @classmethod
    def of(cls, moves: NDArray[np.int16], counts: NDArray[np.int64], *, size: int) -> "_Stones":
        cells = np.where(np.arange(moves.shape[1]) < counts[:, None], moves, np.int16(NO_MOVE))
        colours = np.tile(np.array([BLUE, RED], dtype=np.int8), (len(moves), moves.shape[1] // 2 + 1))
        colours = colours[:, : moves.shape[1]]
        swapped = np.flatnonzero((cells == SWAP).any(axis=1))
        if len(swapped):
            row, column = np.divmod(cells[swapped, 0], np.int16(size))
            cells[swapped, 0], colours[swapped, 0] = column * size + row, RED
            cells[swapped, 1] = NO_MOVE
        return cls(cells, colours)

    def boards(self, size: int) -> Boards:
        """(games, size, size)"""
        # One cell more, at the end, for what is no stone (NO_MOVE is -1).
        boards = np.zeros((len(self.cells), size * size + 1), dtype=np.int8)
        np.put_along_axis(boards, self.cells.astype(np.int64), self.colours, axis=1)
        return np.ascontiguousarray(boards[:, :-1]).reshape(-1, size, size)
