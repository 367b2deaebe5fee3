"""What does a player learn from? Its own games with a search: how often each move was looked at, and who won."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whet.hex.board import NO_MOVE, Boards, Cells
from whet.recipes.hex.arena.openings import random_boards
from whet.recipes.hex.kept_arrays import read_arrays, write_arrays
from whet.recipes.hex.players import SearchPlayer
from whet.recipes.hex.search.tree import Floats
from whet.recipes.hex.views import has_won, passed_on, with_stones

MOST_OPENING_STONES = 3
"""Games begin with 0 to 3 random stones, so that it learns to go on from anything."""


@dataclass(frozen=True, slots=True)
class Played:
    """Positions of games, as their movers saw them."""

    boards: Boards
    shares: Floats
    """(batch, cells): of the looks at each move; all 0 where the game is over."""
    wins: NDArray[np.float32]
    """(batch,): whether the mover won."""
    games: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.boards)

    @property
    def moves(self) -> Cells:
        """(batch,): the move that was looked at most; NO_MOVE where the game is over."""
        return np.where(self.shares.max(1) > 0, self.shares.argmax(1), NO_MOVE)


def play_itself(player: SearchPlayer, *, size: int, num_games: int, free_moves: int, seed: int) -> Played:
    """Games in step; in the first `free_moves` moves are drawn by the looks at them, later the best is taken."""
    draw = np.random.default_rng(seed)
    boards = np.concatenate(
        [random_boards(-(-num_games // 4), size=size, num_stones=n, draw=draw) for n in range(MOST_OPENING_STONES + 1)]
    )[:num_games]
    games, ply = np.arange(len(boards)), 0
    seen: list[tuple[Boards, Floats, NDArray[np.int64]]] = []
    # Whether the mover of a game's first position wins.
    is_first_winner = np.zeros(len(boards), dtype=bool)
    plies = []
    while len(games):
        shares = player.search(boards, draw=draw).shares
        luck = draw.gumbel(size=shares.shape)
        with np.errstate(divide="ignore"):
            moves = (np.log(shares) + luck).argmax(1) if ply < free_moves else shares.argmax(1)
        seen.append((boards, shares, games))
        plies.append(np.full(len(games), ply))
        after = with_stones(boards, moves)
        is_over = has_won(after)
        ply += 1
        if is_over.any():
            # The position after the end teaches the value: its mover has lost.
            seen.append((passed_on(after[is_over]), np.zeros_like(shares[is_over]), games[is_over]))
            plies.append(np.full(int(is_over.sum()), ply))
            is_first_winner[games[is_over]] = ply % 2 == 1
        boards, games = passed_on(after[~is_over]), games[~is_over]
    numbers = np.concatenate([games for _, _, games in seen])
    is_first = np.concatenate(plies) % 2 == 0
    return Played(
        boards=np.concatenate([boards for boards, _, _ in seen]),
        shares=np.concatenate([shares for _, shares, _ in seen]).astype(np.float32),
        wins=(is_first_winner[numbers] == is_first).astype(np.float32),
        games=numbers,
    )


def write_played(path: Path, played: Played) -> None:
    """Whole or not at all."""
    write_arrays(path, {name: getattr(played, name) for name in _ARRAYS})


def read_played(path: Path) -> Played | None:
    """What was written, or None where it is missing or damaged: then it is played again, the same by its seed."""
    kept = read_arrays(path)
    return Played(**kept) if kept is not None and {*kept} == {*_ARRAYS} else None


_ARRAYS = ("boards", "shares", "wins", "games")
