"""Batches of complete games as arrays: replay, unrolling into positions, and generation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whet.recipes.hex.game.board import BLUE, EMPTY, NO_MOVE, RED, SWAP, Boards, Cells
from whet.recipes.hex.game.players import Player, draw_moves
from whet.recipes.hex.game.rules import Colors, Positions, legal, play, start, winners

_GAMES_PER_PASS = 256
"""Games unrolled together: each of their positions takes a row of all its moves for a moment."""


@dataclass(frozen=True, slots=True)
class Games:
    """Games on boards of one size."""

    size: int
    moves: NDArray[np.int16]
    """(games, longest): cells, or SWAP as the second; NO_MOVE after the end."""
    winners: Colors
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
    winners: Colors
    """(games,): who has joined their edges at the end."""


def as_moves(lists: Sequence[Sequence[int]]) -> NDArray[np.int16]:
    """(games, longest): lists of moves, filled up with NO_MOVE."""
    longest = max((len(moves) for moves in lists), default=0)
    filled = np.full((len(lists), longest), NO_MOVE, dtype=np.int16)
    for row, moves in zip(filled, lists, strict=True):
        row[: len(moves)] = moves
    return filled


def judge_games(moves: NDArray[np.int16], *, size: int) -> Verdict:
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
    parts = [
        _unroll(games.take(slice(at, at + _GAMES_PER_PASS)), first_number + at)
        for at in range(0, len(games), _GAMES_PER_PASS)
    ]
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
    colors: NDArray[np.int8]

    @classmethod
    def of(cls, moves: NDArray[np.int16], counts: NDArray[np.int64], *, size: int) -> "_Stones":
        cells = np.where(np.arange(moves.shape[1]) < counts[:, None], moves, np.int16(NO_MOVE))
        colors = np.tile(np.array([BLUE, RED], dtype=np.int8), (len(moves), moves.shape[1] // 2 + 1))
        colors = colors[:, : moves.shape[1]]
        swapped = np.flatnonzero((cells == SWAP).any(axis=1))
        if len(swapped):
            row, column = np.divmod(cells[swapped, 0], np.int16(size))
            cells[swapped, 0], colors[swapped, 0] = column * size + row, RED
            cells[swapped, 1] = NO_MOVE
        return cls(cells, colors)

    def boards(self, size: int) -> Boards:
        """(games, size, size)"""
        # One cell more, at the end, for what is no stone (NO_MOVE is -1).
        boards = np.zeros((len(self.cells), size * size + 1), dtype=np.int8)
        np.put_along_axis(boards, self.cells.astype(np.int64), self.colors, axis=1)
        return np.ascontiguousarray(boards[:, :-1]).reshape(-1, size, size)


_GAMES_IN_STEP = 4096


@dataclass(frozen=True, slots=True)
class Noise:
    """What keeps a player from playing the same game again and again."""

    random_opening: int = 1
    """So many moves at the beginning are any legal ones."""
    epsilon: float = 0.05
    """How often any legal move is played later."""
    temperature: float = 0.5
    """How freely the rest is drawn from the player's policy; 0 takes its best move."""


def play_games(player: Player, *, size: int, count: int, seed: int, noise: Noise | None = None) -> Games:
    """Whole games of a player against itself; the same for the same seed and count."""
    noise = noise or Noise()
    parts = [
        _play_in_step(player, size, min(_GAMES_IN_STEP, count - begin), np.random.default_rng([seed, begin]), noise)
        for begin in range(0, count, _GAMES_IN_STEP)
    ]
    empty = Games(size, np.full((0, size * size), NO_MOVE, dtype=np.int16), np.zeros(0, dtype=np.int8))
    together = [part.moves for part in (parts or [empty])], [part.winners for part in (parts or [empty])]
    return Games(size, np.concatenate(together[0]), np.concatenate(together[1]))


def _play_in_step(player: Player, size: int, count: int, generator: np.random.Generator, noise: Noise) -> Games:
    moves = np.full((count, size * size), NO_MOVE, dtype=np.int16)
    won = np.full(count, EMPTY, dtype=np.int8)
    positions, going_on, ply = start(count, size=size), np.arange(count), 0
    while len(going_on):
        is_free = legal(positions.boards).astype(np.float32)
        chosen = draw_moves(is_free, generator)
        if ply >= noise.random_opening:
            analysis = player.analyze(positions)
            drawn = draw_moves(analysis.policy, generator, temperature=noise.temperature)
            chosen = np.where(generator.random(len(going_on)) < noise.epsilon, chosen, drawn)
        moves[going_on, ply] = chosen
        positions, ply = play(positions, chosen), ply + 1
        now = winners(positions.boards)
        won[going_on] = now
        positions, going_on = positions.take(now == EMPTY), going_on[now == EMPTY]
    return Games(size, moves, won)
