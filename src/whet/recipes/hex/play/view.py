"""The state of a game as the page shows it: the board, suggested moves, and the player's reply."""

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
"""In the first three plies, replies are sampled from the policy with temperature 0.25, so that games differ."""


class Suggestion(FrozenModel):
    """A move, and its probability in the player's policy."""

    cell: int
    name: str
    share: float


class GameView(FrozenModel):
    """The response of `/api/game`."""

    size: int
    cells: tuple[int, ...]
    """The cells, row by row: 0 is empty, 1 blue, 2 red."""
    moves: tuple[str, ...]
    """The moves as names of cells, or "swap"."""
    mover: str
    winner: str | None
    may_swap: bool
    last: int | None
    """The cell of the last stone, or None on an empty board."""
    chain: tuple[int, ...]
    """The cells of the winning chain, or empty while nobody has won."""
    blue_wins: float
    """The player's estimate of the probability that blue wins."""
    suggestions: tuple[Suggestion, ...]
    """Suggested moves, best first."""
    reply: str | None
    """The player's move as the name of a cell or "swap", or None if the game is over."""
    record: str
    """A HexWorld link to the game."""
    player: str


def view_game(player: Player, moves: Sequence[int], *, size: int, seed: int = 0) -> GameView:
    """Return the view of the game after these moves. Raise UsageError for an illegal move."""
    game = replay(tuple(moves), size=size)
    common = {
        "size": size,
        "cells": game.cells,
        "moves": tuple(_name(move, size) for move in game.moves),
        "mover": COLORS[game.mover],
        "may_swap": game.may_swap,
        "last": _last(game),
        "record": write_game(game),
        "player": player.name,
    }
    if game.winner != EMPTY:
        result = {"winner": COLORS[game.winner], "chain": _chain(game), "blue_wins": float(game.winner == BLUE)}
        return GameView(**common, **result, suggestions=(), reply=None)
    analysis = player.analyze(game.position)
    policy, value = analysis.policy[0], float(analysis.value[0])
    best = np.argsort(-policy, kind="stable")[:_NUM_SUGGESTIONS]
    return GameView(
        **common,
        winner=None,
        chain=(),
        blue_wins=value if game.mover == BLUE else 1 - value,
        suggestions=tuple(
            Suggestion(cell=int(cell), name=cell_name(cell, size=size), share=float(policy[cell]))
            for cell in best
            if policy[cell] > 0
        ),
        reply=_name(_reply(player, game, analysis.policy, value, seed), size),
    )


def _reply(player: Player, game: Game, policy: NDArray[np.float32], value: float, seed: int) -> int:
    """Return the player's move: a swap if that is better, a sampled move early in the game, or else the best move."""
    if game.may_swap:
        swapped = player.analyze(game.after(SWAP).position)
        if 1 - float(swapped.value[0]) > value:
            return SWAP
    if len(game.moves) >= _VARIED_PLIES:
        return int(best_moves(policy)[0])
    # The random generator depends only on the moves and the seed, so that repeated requests give the same reply.
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
    """Return the cells of the chain that connects the winner's edges."""
    position: Positions = game.position
    board = position.boards[0] if game.winner == BLUE else position.boards[0].T
    labels = chain_labels(np.ascontiguousarray(board == game.winner)[..., None])[..., 0]
    connecting = set(labels[0].tolist()) & set(labels[-1].tolist()) - {-1}
    is_member = np.isin(labels, list(connecting - {-1}))
    return tuple(np.flatnonzero(is_member if game.winner == BLUE else is_member.T).tolist())
