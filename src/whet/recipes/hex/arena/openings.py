"""From where do two players start? From random openings, each different, so that no game is played twice.

A pair of games tells players apart only if one of them wins both, so an opening that either colour wins with ease is
played for nothing. Of random ones many are such: on 5x5 whoever is to move after two random stones wins 94 %. Even
ones are those in which a third player, who knows no net, sees no side ahead.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from whet.base.errors import UsageError
from whet.hex.board import Boards
from whet.hex.two_distance import TwoDistancePlayer
from whet.recipes.hex.views import as_positions, has_won, passed_on, with_stones

Kind = Literal["random", "even"]
NUM_STONES: dict[Kind, int] = {"random": 2, "even": 3}
"""Of an opening, where nobody says how many. After three, who is to move has a stone less: that is nearer to even."""
_EVEN_WITHIN = 0.05
"""Of a chance of one half. Two-distances are whole numbers: only those who are exactly a move apart are so near."""


def draw_openings(num: int, *, size: int, num_stones: int, seed: int, kind: Kind = "random") -> Boards:
    """Boards after random moves by both in turn, as their movers see them; none is decided, and none comes twice.

    Boards that are half a turn apart count as two.
    """
    draw = np.random.default_rng([seed, size, num_stones])
    boards = np.zeros((0, size, size), dtype=np.int8)
    for _ in range(_MOST_TRIES):
        drawn = random_boards(4 * num, size=size, num_stones=num_stones, draw=draw)
        boards = np.concatenate([boards, drawn[are_even(drawn)] if kind == "even" else drawn])
        _, first = np.unique(boards.reshape(len(boards), size**2), axis=0, return_index=True)
        boards = boards[np.sort(first)]
        if len(boards) >= num:
            return boards[:num]
    more_stones = f"--stones {num_stones + 1 if len(boards) else 2}"
    other = "--openings random" if kind == "even" else more_stones
    raise UsageError(
        "there are not so many openings",
        got=f"{num} {kind} openings of {num_stones} stones on size {size}; {len(boards)} are there",
        try_=f"--games {2 * len(boards)}, or {other}" if len(boards) else other,
    )


_MOST_TRIES = 20


def are_even(boards: Boards) -> NDArray[np.bool_]:
    """Of boards as their movers see them: whether the two-distance player gives both sides the same chance."""
    if not len(boards):
        return np.zeros(0, dtype=bool)
    return np.asarray(np.abs(TwoDistancePlayer().analyse(as_positions(boards)).value - 0.5) < _EVEN_WITHIN)


def random_boards(num: int, *, size: int, num_stones: int, draw: np.random.Generator) -> Boards:
    """Boards after random moves by both in turn, as their movers see them; decided ones are left out."""
    boards = np.zeros((num, size, size), dtype=np.int8)
    for _ in range(num_stones):
        chance = draw.random((len(boards), size * size)) * (boards.reshape(len(boards), size**2) == 0)
        boards = with_stones(boards, chance.argmax(1))
        boards = passed_on(boards[~has_won(boards)])
    return boards
