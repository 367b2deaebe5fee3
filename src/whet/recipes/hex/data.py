"""Which positions are learned from? As columns of tensors, each board as its mover sees it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from whet.hex.games import Games, Samples, unroll
from whet.hex.positions.position_set import PositionSet
from whet.hex.positions.splitting import game_keys
from whet.hex.symmetry import mover_view, transform_moves
from whet.recipes.hex.config import HexConfig, refuse_empty_parts, refuse_other_size
from whet.recipes.hex.made_games import made_games

Columns = dict[str, Tensor]
HELD_OUT_SHARE = 0.05
"""Of the games, for dev, and as many for test."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HexData:
    """Three parts of positions; no game is in two of them."""

    size: int
    train: Columns
    val: Columns
    test: Columns | None
    """None where no game is for it: then nothing is said at the end."""
    fingerprint: str
    notes: tuple[str, ...] = ()


def read_data(config: HexConfig) -> HexData:
    """What a config asks for: the positions of recorded games, or of games that are made now."""
    return _recorded(config, Path(config.data)) if config.data is not None else _made(config)


def _recorded(config: HexConfig, folder: Path) -> HexData:
    found = PositionSet(folder)
    refuse_other_size(config, found.size)
    parts = [columns(found.batch(found.split(name))) for name in ("train", "val", "test")]
    return _of_parts(
        config, parts, size=found.size, fingerprint=found.fingerprint, source=f"{len(found.games):,} games"
    )


def _made(config: HexConfig) -> HexData:
    games = made_games(size=config.default_size, count=config.games)
    parts = [columns(unroll(part)) for part in split(games)]
    digest = hashlib.sha256(np.ascontiguousarray(games.moves).tobytes()).hexdigest()
    source = f"{len(games):,} games of the two-distance player"
    return _of_parts(config, parts, size=games.size, fingerprint=digest, source=source)


def _of_parts(config: HexConfig, parts: list[Columns], *, size: int, fingerprint: str, source: str) -> HexData:
    counts = " + ".join(f"{len(part['move']):,}" for part in parts)
    refuse_empty_parts(*(len(part["move"]) for part in parts))
    note = f"{source} on {size}x{size}: {counts} positions (train, dev, test), split by game"
    train = with_half_turns(parts[0]) if config.augment else parts[0]
    test = parts[2] if len(parts[2]["move"]) else None
    return HexData(size=size, train=train, val=parts[1], test=test, fingerprint=fingerprint, notes=(note,))


def split(games: Games) -> tuple[Games, Games, Games]:
    """Train, dev and test; games that were made by a seed are in no order.

    A game that was learned from judges nothing: it is taken out of the other parts, unless nothing would be left there,
    as on boards that have hardly any games.
    """
    held_out = max(1, int(HELD_OUT_SHARE * len(games)))
    train = games.take(slice(2 * held_out, None))
    known = set(game_keys(train, seed=0))
    return train, _new(games.take(slice(held_out)), known), _new(games.take(slice(held_out, 2 * held_out)), known)


def _new(games: Games, known: set[bytes]) -> Games:
    """Those that are not known, also when turned by 180 degrees; all where all are."""
    is_new = np.array([key not in known for key in game_keys(games, seed=0)], dtype=np.bool_)
    return games.take(is_new) if is_new.any() else games


def columns(samples: Samples) -> Columns:
    """Positions as their movers see them, with the move that was played (-1: none) and whether the mover won."""
    seen, symmetry = mover_view(samples.positions)
    moves = transform_moves(samples.moves, symmetry, size=seen.size)
    return {
        "board": torch.from_numpy(np.ascontiguousarray(seen.boards)),
        "move": torch.from_numpy(np.ascontiguousarray(moves, dtype=np.int64)),
        "win": torch.from_numpy(np.ascontiguousarray(samples.results, dtype=np.float32)),
    }


def with_half_turns(given: Columns) -> Columns:
    """Every position as it is, and turned by 180 degrees: the symmetry that a mover's view leaves to be learned."""
    cells = given["board"][0].numel()
    turned = {"board": given["board"].flip((1, 2)), "win": given["win"]}
    turned["move"] = torch.where(given["move"] < 0, given["move"], cells - 1 - given["move"])
    if "shares" in given:
        turned["shares"] = given["shares"].flip(1)
    return {name: torch.cat((column, turned[name])) for name, column in given.items()}
