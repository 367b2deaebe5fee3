"""Which games are for training, which for judging? A game's own moves decide, so that equal games stay together.

No list of all games is needed, and a file that grows leaves every game where it was.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from whet.hex.games import Games
from whet.hex.symmetry import TURNED, cell_maps

SPLITS = ("train", "val", "test")


def game_keys(games: Games, *, seed: int) -> list[bytes]:
    """16 bytes for each game; a game that is turned by 180 degrees has the same."""
    is_cell = games.moves >= 0
    turned = np.where(is_cell, cell_maps(games.size)[TURNED][np.where(is_cell, games.moves, 0)], games.moves)
    salt = seed.to_bytes(16, "little", signed=True)
    keys = []
    for moves, other, length in zip(games.moves, turned.astype(np.int16), games.lengths, strict=True):
        first = min(moves[:length].tobytes(), other[:length].tobytes())
        keys.append(hashlib.blake2b(first, digest_size=16, salt=salt, person=b"whet hex").digest())
    return keys


def split_of(keys: list[bytes], *, dev_share: float, test_share: float) -> NDArray[np.uint8]:
    """(games,): the place of each game in SPLITS."""
    draws = np.frombuffer(b"".join(keys), dtype="<u8")[::2] / 2.0**64
    return np.select([draws < dev_share, draws < dev_share + test_share], [1, 2], default=0).astype(np.uint8)
