"""Boards of Hex to try things on."""

import numpy as np

from whet.recipes.hex.game.board import BLUE, EMPTY, RED


def random_boards(count: int, *, size: int, seed: int) -> np.ndarray:
    """Boards of all densities, a third of them full: those have the longest chains."""
    generator = np.random.default_rng(seed)
    density = np.where(generator.random(count) < 1 / 3, 1.0, generator.random(count))
    share_of_red = generator.uniform(0.3, 0.7, count)
    is_red = generator.random((count, size, size)) < share_of_red[:, None, None]
    boards = np.where(is_red, RED, BLUE).astype(np.int8)
    boards[generator.random(boards.shape) > density[:, None, None]] = EMPTY
    return boards
