"""From where do two players start? From random openings, each different, so that no game is played twice."""

import numpy as np

from whet.base.errors import UsageError
from whet.hex.board import Boards
from whet.recipes.hex.views import has_won, passed_on, with_stones


def draw_openings(num: int, *, size: int, num_stones: int, seed: int) -> Boards:
    """Boards after random moves by both in turn, as their movers see them; none is decided, and none comes twice.

    Boards that are half a turn apart count as two.
    """
    draw = np.random.default_rng([seed, size, num_stones])
    boards = np.zeros((0, size, size), dtype=np.int8)
    for _ in range(_MOST_TRIES):
        boards = np.concatenate([boards, random_boards(4 * num, size=size, num_stones=num_stones, draw=draw)])
        _, first = np.unique(boards.reshape(len(boards), size**2), axis=0, return_index=True)
        boards = boards[np.sort(first)]
        if len(boards) >= num:
            return boards[:num]
    raise UsageError(
        "there are not so many openings",
        got=f"{num} openings of {num_stones} stones on size {size}; {len(boards)} are there",
        try_=f"--games {2 * len(boards)}, or --stones {num_stones + 1}" if len(boards) else "--stones 2",
    )


_MOST_TRIES = 20


def random_boards(num: int, *, size: int, num_stones: int, draw: np.random.Generator) -> Boards:
    """Boards after random moves by both in turn, as their movers see them; decided ones are left out."""
    boards = np.zeros((num, size, size), dtype=np.int8)
    for _ in range(num_stones):
        chance = draw.random((len(boards), size * size)) * (boards.reshape(len(boards), size**2) == 0)
        boards = with_stones(boards, chance.argmax(1))
        boards = passed_on(boards[~has_won(boards)])
    return boards
