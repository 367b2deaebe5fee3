"""Which games are learned from where none are given? The two-distance player's own, made once and kept."""

import hashlib
import io
import json
from pathlib import Path

import numpy as np

from whet.base import env
from whet.base.errors import WhetError
from whet.hex.board import check_size
from whet.hex.games import Games
from whet.hex.self_play import Noise, play_games
from whet.hex.two_distance import TwoDistancePlayer
from whet.run import durable

_SEED = 0
_VERSION = 1
"""Changed with the player or its noise: kept games of another version are not read."""


def made_games(*, size: int, count: int, noise: Noise | None = None) -> Games:
    """The same games every time; from the cache if it has them."""
    noise = noise or Noise()
    path = env.home() / "hex" / f"games-{check_size(size)}x{size}-{count}-{_key(noise)}.npz"
    games = _read(path, size=size, count=count)
    if games is None:
        games = play_games(TwoDistancePlayer(), size=size, count=count, seed=_SEED, noise=noise)
        _write(path, games)
    return games


def _key(noise: Noise) -> str:
    said = json.dumps([_VERSION, noise.random_opening, noise.epsilon, noise.temperature])
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def _read(path: Path, *, size: int, count: int) -> Games | None:
    """What was kept, or None where it is missing or not what was written."""
    try:
        with np.load(path, allow_pickle=False) as kept:
            moves, winners, digest = kept["moves"], kept["winners"], str(kept["sha256"])
    except (OSError, ValueError, KeyError, EOFError):
        return None
    games = Games(size, moves, winners)
    return games if len(games) == count and digest == _digest(games) else None


def _write(path: Path, games: Games) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, moves=games.moves, winners=games.winners, sha256=np.array(_digest(games)))
    try:
        durable.make_directory(path.parent)
        durable.write_file(path, data=buffer.getvalue())
    except WhetError:
        return  # A home that cannot be written costs some seconds at the next start, not the run.


def _digest(games: Games) -> str:
    return hashlib.sha256(games.moves.tobytes() + games.winners.tobytes()).hexdigest()
