"""Players that use a net, alone or with a search, and loading them by name."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event

import numpy as np
import torch
from pydantic import ValidationError

from whet.base.errors import UsageError, WhetError
from whet.device.abstract import AbstractDevice
from whet.recipes.hex.config import HexConfig
from whet.recipes.hex.game.board import MAX_SIZE, MIN_SIZE, Boards
from whet.recipes.hex.game.players import Analysis, Player, RandomPlayer, TwoDistancePlayer
from whet.recipes.hex.game.rules import Positions
from whet.recipes.hex.game.symmetry import mover_view, transform_policy
from whet.recipes.hex.model import HexNet
from whet.recipes.hex.search import Floats, SearchOptions, TreeSearchResult, search_moves, tree_bytes
from whet.recipes.hex.self_play_state import champion_run, is_selfplay
from whet.run.folder import RECIPE_FILE, open_run
from whet.training.weights import load_weights

_BOARDS_PER_BATCH = 4096
"""Boards that are judged together at most: a bound on memory."""
_TREE_BYTES = 2**30
"""Of the trees that grow at once."""


@dataclass(frozen=True, slots=True)
class NetPlayer:
    """What the net says at first sight."""

    net: HexNet
    device: AbstractDevice
    name: str = "net"
    averages_symmetry: bool = False
    """Whether each board is judged as it is and turned by 180 degrees, and both answers are averaged."""

    def analyze(self, positions: Positions) -> Analysis:
        """The net's policy and value."""
        seen, symmetry = mover_view(positions)
        shares, win = self.judge(seen.boards)
        return Analysis(transform_policy(shares, symmetry, size=positions.size), win)

    def judge(self, boards: Boards) -> tuple[Floats, Floats]:
        """The same for boards as their movers see them."""
        parts = [
            self._judge(boards[start : start + _BOARDS_PER_BATCH]) for start in range(0, len(boards), _BOARDS_PER_BATCH)
        ]
        return np.concatenate([shares for shares, _ in parts]), np.concatenate([win for _, win in parts])

    def _judge(self, boards: Boards) -> tuple[Floats, Floats]:
        given = np.concatenate([boards, boards[:, ::-1, ::-1]]) if self.averages_symmetry else boards
        with torch.inference_mode():
            said = self.net(self.device.put(torch.from_numpy(np.ascontiguousarray(given))))
            shares, win = said.policy.softmax(1).cpu().numpy(), said.win.cpu().numpy()
        if not (np.isfinite(shares).all() and np.isfinite(win).all()):
            raise WhetError("the net says NaN", got=self.name, try_="another checkpoint, or another run")
        if self.averages_symmetry:
            count = len(boards)
            shares, win = (shares[:count] + shares[count:, ::-1]) / 2, (win[:count] + win[count:]) / 2
        return shares, win


@dataclass(frozen=True, slots=True)
class SearchPlayer:
    """A net that looks ahead."""

    net: NetPlayer
    how: SearchOptions
    name: str = "search"
    _asked_to_stop: Event = field(default_factory=Event, repr=False, compare=False)

    def stop(self) -> None:
        """Ends the search that another thread is in, and all later ones, with an error."""
        self._asked_to_stop.set()

    def analyze(self, positions: Positions) -> Analysis:
        """The shares of visits, and what they saw of the result."""
        seen, symmetry = mover_view(positions)
        found = self.search(seen.boards)
        return Analysis(transform_policy(found.shares, symmetry, size=positions.size), found.win)

    def search(self, boards: Boards, *, draw: np.random.Generator | None = None) -> TreeSearchResult:
        """The same for boards as their movers see them, with all that was found; noise is added only with `draw`."""
        how = self.how if draw is not None else replace(self.how, noise_fraction=0.0)
        # A game's search is the same in any company, and noise is drawn game by game.
        step = max(1, _TREE_BYTES // tree_bytes(boards.shape[-1], num_nodes=how.simulations + 1))
        parts = [
            search_moves(boards[start : start + step], self._judge, how, draw=draw)
            for start in range(0, max(1, len(boards)), step)
        ]
        visits, win = (np.concatenate([getattr(part, name) for part in parts]) for name in ("visits", "win"))
        return TreeSearchResult(visits=visits, win=win)

    def _judge(self, boards: Boards) -> tuple[Floats, Floats]:
        if self._asked_to_stop.is_set():
            raise WhetError("the search was stopped", got=self.name, try_="a new one")
        return self.net.judge(boards)


PLAYERS: dict[str, Callable[[], Player]] = {"random": RandomPlayer, "two-distance": TwoDistancePlayer}
"""Who plays without a net."""
_RESTORE = "restore this file from a copy, or another run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Opponent:
    """A player, and the size it learned to play; None for those who play any."""

    player: Player
    size: int | None = None


def load_opponent(word: str, *, device: AbstractDevice, checkpoint: str = "last") -> Opponent:
    """The player behind a word."""
    if word in PLAYERS:
        return Opponent(player=PLAYERS[word]())
    path, simulations = parse_player(word)
    net, size = load_net(path, device=device, checkpoint=checkpoint)
    player = NetPlayer(net, device, name=word)
    if simulations is None:
        return Opponent(player=player, size=size)
    return Opponent(player=SearchPlayer(player, SearchOptions(simulations=simulations), name=word), size=size)


def parse_player(word: str) -> tuple[Path, int | None]:
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
    if not isinstance(size, int) or not MIN_SIZE <= size <= MAX_SIZE:
        raise WhetError(f"{path / RECIPE_FILE} is damaged", got=f"size {size}", try_=_RESTORE)
    net = HexNet(arch)
    load_weights(path, net, checkpoint=checkpoint)
    device.put_model(net)
    return net.eval(), size
