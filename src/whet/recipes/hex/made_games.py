"""Which games are learned from where none are given? The two-distance player's own, made once and kept."""

import hashlib
import json
from pathlib import Path

from whet.base import env
from whet.base.errors import WhetError
from whet.hex.board import check_size
from whet.hex.games import Games
from whet.hex.self_play import Noise, play_games
from whet.hex.two_distance import TwoDistancePlayer
from whet.recipes.hex.kept_arrays import read_arrays, write_arrays
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
    kept = read_arrays(path)
    if kept is None or {*kept} != {"moves", "winners"} or len(kept["moves"]) != count:
        return None
    return Games(size, kept["moves"], kept["winners"])


def _write(path: Path, games: Games) -> None:
    try:
        durable.make_directory(path.parent)
        write_arrays(path, {"moves": games.moves, "winners": games.winners})
    except WhetError:
        return  # A home that cannot be written costs some seconds at the next start, not the run.
