"""Batches of complete games as arrays: replay, unrolling into positions, and generation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whet.recipes.hex.game.board import BLUE, EMPTY, NO_MOVE, RED, SWAP, Boards, Cells
from whet.recipes.hex.game.players import Player, draw_moves
from whet.recipes.hex.game.rules import Colors, Positions, legal, play, start, winners

_GAMES_PER_PASS = 256
"""Number of games unrolled at once. It bounds memory, because every position then has a copy of its game's moves."""


@dataclass(frozen=True, slots=True)
class Games:
    """Games on boards of one size."""

    size: int
    moves: NDArray[np.int16]
    """(games, longest): cells, or SWAP as the second move. NO_MOVE after the end."""
    winners: Colors
    """(games,): the winner of each game, or EMPTY if unknown."""

    def __len__(self) -> int:
        return len(self.moves)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of moves of each game, (games,)."""
        return (self.moves != NO_MOVE).sum(axis=1)

    def take(self, index: "NDArray[np.int64] | NDArray[np.bool_] | slice") -> "Games":
        return Games(self.size, self.moves[index], self.winners[index])

    def move_list(self, game: int) -> tuple[int, ...]:
        return tuple(int(move) for move in self.moves[game] if move != NO_MOVE)


@dataclass(frozen=True, slots=True)
class Samples:
    """Positions with the move played and the result, used as training samples."""

    positions: Positions
    moves: Cells
    """(batch,): the cell played, or NO_MOVE at the end of a game and for a swap."""
    results: NDArray[np.float32]
    """(batch,): 1 if the mover won the game, otherwise 0."""

    def __len__(self) -> int:
        return len(self.moves)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The legality and the winners of replayed games."""

    is_legal: NDArray[np.bool_]
    """(games,): true if all moves are on empty cells, only the second move is a swap, and only the last move wins."""
    winners: Colors
    """(games,): the player who has connected their edges at the end of the game, or EMPTY."""


def as_moves(lists: Sequence[Sequence[int]]) -> NDArray[np.int16]:
    """Return lists of moves as an array, padded with NO_MOVE."""
    longest = max((len(moves) for moves in lists), default=0)
    padded = np.full((len(lists), longest), NO_MOVE, dtype=np.int16)
    for row, moves in zip(padded, lists, strict=True):
        row[: len(moves)] = moves
    return padded


def judge_games(moves: NDArray[np.int16], *, size: int) -> Verdict:
    """Replay all games, (games, longest), at once. Return their legality and winners."""
    is_swap = moves == SWAP
    is_valid = ((moves >= NO_MOVE) & (moves < size * size)) | is_swap
    is_valid[:, :1] &= ~is_swap[:, :1]
    is_valid[:, 2:] &= ~is_swap[:, 2:]
    is_legal = np.asarray(is_valid.all(axis=1))
    moves = np.where(is_legal[:, None], moves, np.int16(NO_MOVE))
    lengths = (moves != NO_MOVE).sum(axis=1)
    final = _Stones.of(moves, lengths, size=size)
    ordered = np.sort(final.cells, axis=1)
    is_legal &= ~((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NO_MOVE)).any(axis=1)
    # Stones are never removed, so checking the position before the last move finds any earlier winner.
    is_legal &= winners(_Stones.of(moves, lengths - 1, size=size).boards(size)) == EMPTY
    return Verdict(is_legal, np.where(is_legal, winners(final.boards(size)), np.int8(EMPTY)))


def join_games(parts: Sequence[Games]) -> Games:
    """Concatenate one or more batches of games on boards of one size."""
    longest = max(part.moves.shape[1] for part in parts)
    moves = [
        np.pad(part.moves, ((0, 0), (0, longest - part.moves.shape[1])), constant_values=NO_MOVE) for part in parts
    ]
    return Games(parts[0].size, np.concatenate(moves), np.concatenate([part.winners for part in parts]))


def unroll(games: Games) -> Samples:
    """Return all positions of all games in order, including the final positions, which have no move."""
    starts = range(0, max(1, len(games)), _GAMES_PER_PASS)
    parts = [_unroll(games.take(slice(start, start + _GAMES_PER_PASS))) for start in starts]
    boards, movers, moves, results = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Samples(positions=Positions(boards, movers), moves=moves, results=results)


def _unroll(games: Games) -> tuple[Boards, Colors, Cells, NDArray[np.float32]]:
    """Return the boards, movers, moves and results of all positions."""
    steps = games.lengths + 1
    game = np.repeat(np.arange(len(games)), steps)
    ply = np.arange(len(game)) - np.repeat(np.cumsum(steps) - steps, steps)
    boards = _Stones.of(games.moves[game], ply, size=games.size).boards(games.size)
    movers = np.where(ply % 2 == 0, BLUE, RED).astype(np.int8)
    no_move = np.full((len(games), 1), NO_MOVE, dtype=np.int16)
    played = np.concatenate([games.moves, no_move], axis=1)[game, ply].astype(np.int64)
    results = (games.winners[game] == movers).astype(np.float32)
    return boards, movers, np.where(played == SWAP, NO_MOVE, played), results


@dataclass(frozen=True, slots=True)
class _Stones:
    """The stones on each board after some moves of each game."""

    cells: NDArray[np.int16]
    """(games, longest): the cell of the stone of each move, or NO_MOVE for later moves and for a swap."""
    colors: NDArray[np.int8]
    """(games, longest): the color of the stone of each move."""

    @classmethod
    def of(cls, moves: NDArray[np.int16], counts: NDArray[np.int64], *, size: int) -> "_Stones":
        cells = np.where(np.arange(moves.shape[1]) < counts[:, None], moves, np.int16(NO_MOVE))
        colors = np.tile(np.array([BLUE, RED], dtype=np.int8), (len(moves), moves.shape[1] // 2 + 1))
        colors = colors[:, : moves.shape[1]]
        swapped = np.flatnonzero((cells == SWAP).any(axis=1))
        if len(swapped):
            # A swap mirrors the first stone and makes it red, but does not place a stone.
            row, column = np.divmod(cells[swapped, 0], np.int16(size))
            cells[swapped, 0], colors[swapped, 0] = column * size + row, RED
            cells[swapped, 1] = NO_MOVE
        return cls(cells, colors)

    def boards(self, size: int) -> Boards:
        # Scatter into an extra cell at the end: entries without a stone have the index NO_MOVE, which is -1.
        boards = np.zeros((len(self.cells), size * size + 1), dtype=np.int8)
        np.put_along_axis(boards, self.cells.astype(np.int64), self.colors, axis=1)
        return np.ascontiguousarray(boards[:, :-1]).reshape(-1, size, size)


_GAMES_IN_STEP = 4096


@dataclass(frozen=True, slots=True)
class Noise:
    """Randomness that makes the games of a deterministic player differ."""

    random_opening: int = 1
    """Number of uniformly random moves at the start."""
    epsilon: float = 0.05
    """Probability of a uniformly random move after the opening."""
    temperature: float = 0.5
    """Temperature for sampling all other moves from the policy. 0 selects the best move."""


def play_games(player: Player, *, size: int, count: int, seed: int, noise: Noise | None = None) -> Games:
    """Let a player play complete games against itself. The games are deterministic for the same arguments."""
    noise = noise or Noise()
    parts = [
        _play_in_step(player, size, min(_GAMES_IN_STEP, count - begin), np.random.default_rng([seed, begin]), noise)
        for begin in range(0, max(1, count), _GAMES_IN_STEP)
    ]
    return join_games(parts)


def _play_in_step(player: Player, size: int, count: int, generator: np.random.Generator, noise: Noise) -> Games:
    moves = np.full((count, size * size), NO_MOVE, dtype=np.int16)
    won = np.full(count, EMPTY, dtype=np.int8)
    positions, active, ply = start(count, size=size), np.arange(count), 0
    while len(active):
        is_legal = legal(positions.boards).astype(np.float32)
        chosen = draw_moves(is_legal, generator)
        if ply >= noise.random_opening:
            analysis = player.analyze(positions)
            drawn = draw_moves(analysis.policy, generator, temperature=noise.temperature)
            chosen = np.where(generator.random(len(active)) < noise.epsilon, chosen, drawn)
        moves[active, ply] = chosen
        positions, ply = play(positions, chosen), ply + 1
        winner = winners(positions.boards)
        won[active] = winner
        positions, active = positions.take(winner == EMPTY), active[winner == EMPTY]
    return Games(size, moves, won)
