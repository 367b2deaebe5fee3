"""How are games made without records? A noisy player plays against itself; a seed gives the same games again."""

from dataclasses import dataclass

import numpy as np

from whet.hex.board import EMPTY, NO_MOVE
from whet.hex.connecting import winners
from whet.hex.games import Games
from whet.hex.player import Player, draw_moves
from whet.hex.rules import legal, play, start

_IN_STEP = 4096


@dataclass(frozen=True, slots=True)
class Noise:
    """What keeps a player from playing the same game again and again."""

    random_opening: int = 1
    """So many moves at the beginning are any legal ones."""
    epsilon: float = 0.05
    """How often any legal move is played later."""
    temperature: float = 0.5
    """How freely the rest is drawn from the player's policy; 0 takes its best move."""


def play_games(player: Player, *, size: int, count: int, seed: int, noise: Noise | None = None) -> Games:
    """Whole games of a player against itself; the same for the same seed and count."""
    noise = noise or Noise()
    parts = [
        _in_step(player, size, min(_IN_STEP, count - begin), np.random.default_rng([seed, begin]), noise)
        for begin in range(0, count, _IN_STEP)
    ]
    empty = Games(size, np.full((0, size * size), NO_MOVE, dtype=np.int16), np.zeros(0, dtype=np.int8))
    together = [part.moves for part in (parts or [empty])], [part.winners for part in (parts or [empty])]
    return Games(size, np.concatenate(together[0]), np.concatenate(together[1]))


def _in_step(player: Player, size: int, count: int, generator: np.random.Generator, noise: Noise) -> Games:
    moves = np.full((count, size * size), NO_MOVE, dtype=np.int16)
    won = np.full(count, EMPTY, dtype=np.int8)
    positions, going_on, ply = start(count, size=size), np.arange(count), 0
    while len(going_on):
        is_free = legal(positions.boards).astype(np.float32)
        chosen = draw_moves(is_free, generator)
        if ply >= noise.random_opening:
            analysis = player.analyse(positions)
            drawn = draw_moves(analysis.policy, generator, temperature=noise.temperature)
            chosen = np.where(generator.random(len(going_on)) < noise.epsilon, chosen, drawn)
        moves[going_on, ply] = chosen
        positions, ply = play(positions, chosen), ply + 1
        now = winners(positions.boards)
        won[going_on] = now
        positions, going_on = positions.take(now == EMPTY), going_on[now == EMPTY]
    return Games(size, moves, won)
