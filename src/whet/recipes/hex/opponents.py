"""Who is meant by a word: random, two-distance, a run, or a run that looks ahead (RUN@64)?"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from whet.base.errors import UsageError, WhetError
from whet.device.abstract import AbstractDevice
from whet.hex.board import LEAST_SIZE, MOST_SIZE
from whet.hex.player import Player, RandomPlayer
from whet.hex.two_distance import TwoDistancePlayer
from whet.recipes.hex.config import HexConfig
from whet.recipes.hex.net import HexNet
from whet.recipes.hex.players import NetPlayer, SearchPlayer
from whet.recipes.hex.search.mcts import Search
from whet.recipes.hex.selfplay.state import champion_run, is_selfplay
from whet.run.folder import RECIPE_FILE, open_run
from whet.training.weights import load_weights

PLAYERS: dict[str, Callable[[], Player]] = {"random": RandomPlayer, "two-distance": TwoDistancePlayer}
"""Who plays without a net."""
_RESTORE = "restore this file from a copy, or another run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Opponent:
    """A player, and the size it learned to play; None for those who play any."""

    player: Player
    size: int | None = None


def find_opponent(word: str, *, device: AbstractDevice, checkpoint: str = "last") -> Opponent:
    """The player behind a word."""
    if word in PLAYERS:
        return Opponent(player=PLAYERS[word]())
    path, simulations = split_word(word)
    net, size = load_net(path, device=device, checkpoint=checkpoint)
    player = NetPlayer(net, device, name=word)
    if simulations is None:
        return Opponent(player=player, size=size)
    return Opponent(player=SearchPlayer(player, Search(simulations=simulations), name=word), size=size)


def split_word(word: str) -> tuple[Path, int | None]:
    """RUN@64 as the run and the number of simulations; a folder may have an @ in its name."""
    place, sign, number = word.rpartition("@")
    if not sign or os.path.exists(word):  # noqa: PTH110  Path.exists() raises for a name that is too long.
        return Path(word), None
    if not (number.isdecimal() and len(number) < 7 and 1 <= int(number) <= 100_000):
        raise UsageError("not a number of simulations", got=word[-200:], try_=f"{place[-200:]}@64")
    if place in PLAYERS:
        raise UsageError(f"{place} does not look ahead", got=word, try_=f"{place}, or RUN@{number}")
    return Path(place), int(number)


def load_net(path: Path, *, device: AbstractDevice, checkpoint: str = "last") -> tuple[HexNet, int]:
    """A run's net, or that of a self-play's champion, ready to be asked; and the size of the boards it learned from."""
    if not os.path.exists(path):  # noqa: PTH110
        raise UsageError("no such player", got=str(path)[-200:], try_=f"{', '.join(PLAYERS)}, a run, or RUN@64")
    path = champion_run(path) if is_selfplay(path) else path
    run = open_run(path)
    if run.header.recipe != "hex":
        raise UsageError("that run does not play Hex", got=f"{path} is of {run.header.recipe}", try_="a run of hex")
    try:
        arch = HexConfig.model_validate(run.config).arch
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise WhetError(f"{path / 'config.json'} is damaged", got=where, try_=_RESTORE) from None
    size = run.metadata.get("size")
    if not isinstance(size, int) or not LEAST_SIZE <= size <= MOST_SIZE:
        raise WhetError(f"{path / RECIPE_FILE} is damaged", got=f"size {size}", try_=_RESTORE)
    net = HexNet(arch)
    load_weights(path, net, checkpoint=checkpoint)
    device.put_model(net)
    return net.eval(), size
