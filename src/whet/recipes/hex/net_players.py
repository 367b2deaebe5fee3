"""Players that use a net, with or without search, and a loader for players by name."""

import os
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
from whet.recipes.hex.game.players import NETLESS_PLAYERS, Analysis, Player
from whet.recipes.hex.game.rules import Positions
from whet.recipes.hex.game.symmetry import mover_view, transform_policy
from whet.recipes.hex.model import HexNet
from whet.recipes.hex.search import Floats, SearchOptions, TreeSearchResult, search_moves, tree_bytes
from whet.recipes.hex.self_play_state import champion_run, is_selfplay
from whet.run.folder import RECIPE_FILE, open_run
from whet.training.weights import load_weights

_BOARDS_PER_BATCH = 4096
"""Maximum number of boards per evaluation, which bounds memory."""
_TREE_BYTES = 2**30
"""Memory limit for all search trees together."""


@dataclass(frozen=True, slots=True)
class NetPlayer:
    """Plays by the policy of a net, without search."""

    net: HexNet
    device: AbstractDevice
    name: str = "net"
    averages_symmetry: bool = False
    """Whether to average the evaluations of each board and its rotation by 180 degrees."""

    def analyze(self, positions: Positions) -> Analysis:
        viewed, symmetry = mover_view(positions)
        policy, win = self.evaluate(viewed.boards)
        return Analysis(transform_policy(policy, symmetry, size=positions.size), win)

    def evaluate(self, boards: Boards) -> tuple[Floats, Floats]:
        """Return the policy, (batch, cells), and win probability, (batch,), of boards in the mover's perspective."""
        parts = [
            self._evaluate(boards[start : start + _BOARDS_PER_BATCH])
            for start in range(0, len(boards), _BOARDS_PER_BATCH)
        ]
        return np.concatenate([policy for policy, _ in parts]), np.concatenate([win for _, win in parts])

    def _evaluate(self, boards: Boards) -> tuple[Floats, Floats]:
        inputs = np.concatenate([boards, boards[:, ::-1, ::-1]]) if self.averages_symmetry else boards
        with torch.inference_mode():
            output = self.net(self.device.put(torch.from_numpy(np.ascontiguousarray(inputs))))
            policy, win = output.policy.softmax(1).cpu().numpy(), output.win.cpu().numpy()
        if not (np.isfinite(policy).all() and np.isfinite(win).all()):
            raise WhetError("the net's outputs are NaN", got=self.name, try_="another checkpoint, or another run")
        if self.averages_symmetry:
            count = len(boards)
            policy, win = (policy[:count] + policy[count:, ::-1]) / 2, (win[:count] + win[count:]) / 2
        return policy, win


@dataclass(frozen=True, slots=True)
class SearchPlayer:
    """Plays by a tree search that uses a net."""

    net: NetPlayer
    options: SearchOptions
    name: str = "search"
    _is_stopped: Event = field(default_factory=Event, repr=False, compare=False)

    def stop(self) -> None:
        """Make the search that runs in another thread, and all later searches, raise WhetError."""
        self._is_stopped.set()

    def analyze(self, positions: Positions) -> Analysis:
        viewed, symmetry = mover_view(positions)
        result = self.search(viewed.boards)
        return Analysis(transform_policy(result.shares, symmetry, size=positions.size), result.win)

    def search(self, boards: Boards, *, draw: np.random.Generator | None = None) -> TreeSearchResult:
        """Search from boards in the mover's perspective. Noise is added only if `draw` is given."""
        options = self.options if draw is not None else replace(self.options, noise_fraction=0.0)
        # Chunks do not change the result: the search of a game does not depend on the batch, and noise is drawn game by
        # game.
        step = max(1, _TREE_BYTES // tree_bytes(boards.shape[-1], num_nodes=options.simulations + 1))
        parts = [
            search_moves(boards[start : start + step], self._evaluate, options, draw=draw)
            for start in range(0, max(1, len(boards)), step)
        ]
        visits, win = (np.concatenate([getattr(part, name) for part in parts]) for name in ("visits", "win"))
        return TreeSearchResult(visits=visits, win=win)

    def _evaluate(self, boards: Boards) -> tuple[Floats, Floats]:
        if self._is_stopped.is_set():
            raise WhetError("the search was stopped", got=self.name, try_="start it again")
        return self.net.evaluate(boards)


_RESTORE = "restore this file from a backup, or use another run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Opponent:
    """A player, and the board size that it was trained on, or None if it plays on any size."""

    player: Player
    size: int | None = None


def load_opponent(name: str, *, device: AbstractDevice, checkpoint: str = "last") -> Opponent:
    """Load a player: `random`, `two-distance`, a run, or RUN@64 for a search with 64 simulations per move."""
    if name in NETLESS_PLAYERS:
        return Opponent(player=NETLESS_PLAYERS[name])
    path, simulations = parse_player(name)
    net, size = load_net(path, device=device, checkpoint=checkpoint)
    player = NetPlayer(net, device, name=name)
    if simulations is None:
        return Opponent(player=player, size=size)
    return Opponent(player=SearchPlayer(player, SearchOptions(simulations=simulations), name=name), size=size)


def parse_player(name: str) -> tuple[Path, int | None]:
    """Split RUN@64 into the run and the number of simulations, or None if there is none.

    An existing path is always a run, even if its name contains an @.
    """
    run, sign, number = name.rpartition("@")
    if not sign or os.path.exists(name):  # noqa: PTH110  Path.exists() raises for a name that is too long.
        return Path(name), None
    if not (number.isdecimal() and len(number) < 7 and 1 <= int(number) <= 100_000):
        raise UsageError("not a number of simulations", got=name[-200:], try_=f"{run[-200:]}@64")
    if run in NETLESS_PLAYERS:
        raise UsageError(f"{run} does not search", got=name, try_=f"{run}, or RUN@{number}")
    return Path(run), int(number)


def load_net(path: Path, *, device: AbstractDevice, checkpoint: str = "last") -> tuple[HexNet, int]:
    """Load the net of a run, or of the champion of a self-play run. Return the net and its board size."""
    if not os.path.exists(path):  # noqa: PTH110
        raise UsageError("no such player", got=str(path)[-200:], try_=f"{', '.join(NETLESS_PLAYERS)}, a run, or RUN@64")
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
