"""Who wins? Two players, every opening twice with colours changed, all games in step."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from whet.hex.board import Boards
from whet.hex.player import Analysis
from whet.hex.rules import Positions
from whet.recipes.hex.views import as_positions, has_won, passed_on, with_stones

Watch = Callable[[int, int], None]
"""Told how many games are over, and of how many."""


class Player(Protocol):
    """Who can play; `whet.hex.player.Player` without its name."""

    def analyse(self, positions: Positions) -> Analysis: ...


def play_match(
    one: Player, two: Player, openings: Boards, *, seed: int = 0, watch: Watch | None = None
) -> NDArray[np.int64]:
    """The wins (0, 1 or 2) of the first player from each opening: once it is to move there, once the other is.

    Each player takes its best move; where several are as good, one is drawn.
    """
    num = len(openings)
    boards = np.concatenate([openings, openings])
    games = np.arange(2 * num)
    is_one = games < num
    wins = np.zeros(num, dtype=np.int64)
    draw = np.random.default_rng(seed)
    while len(games):
        # Drawn for all games, over or not, so that a game is the same whatever the others do.
        luck = draw.random((2 * num, openings[0].size))[games]
        moves = np.zeros(len(games), dtype=np.int64)
        for player, is_its in ((one, is_one), (two, ~is_one)):
            if is_its.any():
                shares = player.analyse(as_positions(boards[is_its])).policy
                moves[is_its] = (luck[is_its] * (shares == shares.max(1, keepdims=True))).argmax(1)
        after = with_stones(boards, moves)
        is_over = has_won(after)
        np.add.at(wins, games[is_over & is_one] % num, 1)
        boards, games, is_one = passed_on(after[~is_over]), games[~is_over], ~is_one[~is_over]
        if watch is not None:
            watch(2 * num - len(games), 2 * num)
    return wins
