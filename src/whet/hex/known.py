"""Who plays without a net, and on which boards?"""

from whet.hex.player import Player, RandomPlayer
from whet.hex.two_distance import TwoDistancePlayer

KNOWN: dict[str, Player] = {"random": RandomPlayer(), "two-distance": TwoDistancePlayer()}
SIZES = tuple(range(3, 20))
"""Boards that a person can be asked to play on."""
