"""Who plays with a net? The net alone, or with a search; both can be asked like any other player of Hex."""

from dataclasses import dataclass, field, replace
from threading import Event

import numpy as np
import torch

from whet.base.errors import WhetError
from whet.device.abstract import AbstractDevice
from whet.hex.board import Boards
from whet.hex.player import Analysis
from whet.hex.rules import Positions
from whet.hex.symmetry import mover_view, transform_policy
from whet.recipes.hex.net import HexNet
from whet.recipes.hex.search.mcts import Found, Search, search_moves
from whet.recipes.hex.search.tree import Floats, tree_bytes

_AT_ONCE = 4096
"""Boards that are judged together at most: a bound on memory."""
_TREE_BYTES = 2**30
"""Of the trees that grow at once."""


@dataclass(frozen=True, slots=True)
class NetPlayer:
    """What the net says at first sight."""

    net: HexNet
    device: AbstractDevice
    name: str = "net"
    has_two_looks: bool = False
    """Whether each board is judged as it is and turned by 180 degrees, and both answers are averaged."""

    def analyse(self, positions: Positions) -> Analysis:
        """The net's policy and value."""
        seen, symmetry = mover_view(positions)
        shares, win = self.judge(seen.boards)
        return Analysis(transform_policy(shares, symmetry, size=positions.size), win)

    def judge(self, boards: Boards) -> tuple[Floats, Floats]:
        """The same for boards as their movers see them."""
        parts = [self._judge(boards[start : start + _AT_ONCE]) for start in range(0, len(boards), _AT_ONCE)]
        return np.concatenate([shares for shares, _ in parts]), np.concatenate([win for _, win in parts])

    def _judge(self, boards: Boards) -> tuple[Floats, Floats]:
        given = np.concatenate([boards, boards[:, ::-1, ::-1]]) if self.has_two_looks else boards
        with torch.inference_mode():
            said = self.net(self.device.put(torch.from_numpy(np.ascontiguousarray(given))))
            shares, win = said.policy.softmax(1).cpu().numpy(), said.win.cpu().numpy()
        if not (np.isfinite(shares).all() and np.isfinite(win).all()):
            raise WhetError("the net says NaN", got=self.name, try_="another checkpoint, or another run")
        if self.has_two_looks:
            count = len(boards)
            shares, win = (shares[:count] + shares[count:, ::-1]) / 2, (win[:count] + win[count:]) / 2
        return shares, win


@dataclass(frozen=True, slots=True)
class SearchPlayer:
    """A net that looks ahead."""

    net: NetPlayer
    how: Search
    name: str = "search"
    _asked_to_stop: Event = field(default_factory=Event, repr=False, compare=False)

    def stop(self) -> None:
        """Ends the search that another thread is in, and all later ones, with an error."""
        self._asked_to_stop.set()

    def analyse(self, positions: Positions) -> Analysis:
        """The shares of visits, and what they saw of the result."""
        seen, symmetry = mover_view(positions)
        found = self.search(seen.boards)
        return Analysis(transform_policy(found.shares, symmetry, size=positions.size), found.win)

    def search(self, boards: Boards, *, draw: np.random.Generator | None = None) -> Found:
        """The same for boards as their movers see them, with all that was found; noise is added only with `draw`."""
        how = self.how if draw is not None else replace(self.how, noise_share=0.0)
        # A game's search is the same in any company, and noise is drawn game by game.
        step = max(1, _TREE_BYTES // tree_bytes(boards.shape[-1], num_nodes=how.simulations + 1))
        parts = [
            search_moves(boards[start : start + step], self._judge, how, draw=draw)
            for start in range(0, max(1, len(boards)), step)
        ]
        visits, win = (np.concatenate([getattr(part, name) for part in parts]) for name in ("visits", "win"))
        return Found(visits=visits, win=win)

    def _judge(self, boards: Boards) -> tuple[Floats, Floats]:
        if self._asked_to_stop.is_set():
            raise WhetError("the search was stopped", got=self.name, try_="a new one")
        return self.net.judge(boards)
