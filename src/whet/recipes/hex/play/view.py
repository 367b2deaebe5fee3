"""The state of a game as shown to a person: board, hints and the player's reply."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from whet.base.model import FrozenModel
from whet.recipes.hex.game.board import BLUE, COLORS, EMPTY, RED, SWAP, cell_name
from whet.recipes.hex.game.distance import chain_labels
from whet.recipes.hex.game.game import Game, replay
from whet.recipes.hex.game.notation import write_game
from whet.recipes.hex.game.players import Player, best_moves, draw_moves
from whet.recipes.hex.game.rules import Positions

_NUM_SUGGESTIONS = 5
_VARIED_PLIES, _VARIATION = 3, 0.25
"""The first moves of a player are drawn, so that no two games need be the same."""


class Suggestion(FrozenModel):
    """A move and how much of the player's policy it has."""

    cell: int
    name: str
    share: float


class GameView(FrozenModel):
    """A game as it is now."""

    size: int
    cells: tuple[int, ...]
    """Row by row: 0 empty, 1 blue, 2 red."""
    moves: tuple[str, ...]
    """Cells by name, or "swap"."""
    mover: str
    winner: str | None
    may_swap: bool
    last: int | None
    """The stone that came last."""
    chain: tuple[int, ...]
    """The stones that won."""
    blue_wins: float
    """The chance of blue, as the player sees it."""
    suggestions: tuple[Suggestion, ...]
    """The best first."""
    reply: str | None
    """What the player would do now: a cell by name, or "swap"."""
    record: str
    """A link that shows the game elsewhere."""
    player: str


def view_game(player: Player, moves: Sequence[int], *, size: int, seed: int = 0) -> GameView:
    """The game after some moves; a move that is not legal is refused and named."""
    game = replay(tuple(moves), size=size)
    common = {
        "size": size,
        "cells": game.cells,
        "moves": tuple(_name(move, size) for move in game.moves),
        "mover": COLORS[game.mover],
        "may_swap": game.may_swap,
        "last": _last(game),
        "record": write_game(game, "hexworld"),
        "player": player.name,
    }
    if game.winner != EMPTY:
        ends = {"winner": COLORS[game.winner], "chain": _chain(game), "blue_wins": float(game.winner == BLUE)}
        return GameView(**common, **ends, suggestions=(), reply=None)
    analysis = player.analyze(game.position)
    shares, value = analysis.policy[0], float(analysis.value[0])
    best = np.argsort(-shares, kind="stable")[:_NUM_SUGGESTIONS]
    return GameView(
        **common,
        winner=None,
        chain=(),
        blue_wins=value if game.mover == BLUE else 1 - value,
        suggestions=tuple(
            Suggestion(cell=int(cell), name=cell_name(cell, size=size), share=float(shares[cell]))
            for cell in best
            if shares[cell] > 0
        ),
        reply=_name(_reply(player, game, analysis.policy, value, seed), size),
    )


def _reply(player: Player, game: Game, policy: NDArray[np.float32], value: float, seed: int) -> int:
    """Its move: the best one, after a few that are drawn; or a swap, where that gives it the better side."""
    if game.may_swap:
        swapped = player.analyze(game.after(SWAP).position)
        if 1 - float(swapped.value[0]) > value:
            return SWAP
    if len(game.moves) >= _VARIED_PLIES:
        return int(best_moves(policy)[0])
    # The same game and seed give the same move, whoever asks how often.
    digest = hashlib.sha256(repr((seed, game.moves)).encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    return int(draw_moves(policy, generator, temperature=_VARIATION)[0])


def _name(move: int, size: int) -> str:
    return "swap" if move == SWAP else cell_name(move, size=size)


def _last(game: Game) -> int | None:
    if not game.moves:
        return None
    return game.cells.index(RED) if game.moves[-1] == SWAP else game.moves[-1]


def _chain(game: Game) -> tuple[int, ...]:
    """The chain that joins the winner's edges."""
    position: Positions = game.position
    board = position.boards[0] if game.winner == BLUE else position.boards[0].T
    labels = chain_labels(np.ascontiguousarray(board == game.winner)[..., None])[..., 0]
    joined = set(labels[0].tolist()) & set(labels[-1].tolist()) - {-1}
    found = np.isin(labels, list(joined - {-1}))
    return tuple(np.flatnonzero(found if game.winner == BLUE else found.T).tolist())
