"""How does a generation learn? The Hex recipe, from the newest games of champions instead of given ones."""

from collections.abc import Sequence

import numpy as np
import torch

from whet.recipes.hex.config import HexConfig
from whet.recipes.hex.data import Columns, HexData, with_half_turns
from whet.recipes.hex.recipe import HexRecipe
from whet.recipes.hex.selfplay.playing import Played

_HELD_OUT = 20
"""Every twentieth game is for dev, and every twentieth for test."""


class GenerationRecipe(HexRecipe):
    """Learns from what was played; by shares of looks where others learn from single moves."""

    def __init__(self, played: Sequence[Played], *, size: int, fingerprint: str) -> None:
        self._played = played
        self._size = size
        self._fingerprint = fingerprint

    def data(self, config: HexConfig) -> HexData:
        parts = {name: [] for name in ("train", "val", "test")}  # type: dict[str, list[Columns]]
        for played in self._played:
            part = played.games % _HELD_OUT
            for name, is_its in (("train", part > 1), ("val", part == 0), ("test", part == 1)):
                parts[name].append(_columns(played, is_its))
        train, val, test = (_joined(columns) for columns in parts.values())
        train = with_half_turns(train) if config.augment else train
        return HexData(size=self._size, train=train, val=val, test=test, fingerprint=self._fingerprint)


def _columns(played: Played, is_its: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> Columns:
    return {
        "board": torch.from_numpy(played.boards[is_its]),
        "move": torch.from_numpy(played.moves[is_its]),
        "win": torch.from_numpy(played.wins[is_its]),
        "shares": torch.from_numpy(played.shares[is_its]),
    }


def _joined(parts: list[Columns]) -> Columns:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
