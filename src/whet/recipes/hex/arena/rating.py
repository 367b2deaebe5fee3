"""What do the points of a match prove? A win rate and an Elo difference, each with an interval; no torch."""

import math
from collections.abc import Sequence
from statistics import fmean, variance

from whet.base.model import FrozenModel

_CONFIDENCE_95 = 1.959964


class Rating(FrozenModel):
    """How the first player fared."""

    num_games: int
    num_wins: int
    num_pairs_won: int
    num_pairs_lost: int
    """Openings of which both games went to the same player; what the others say is that nobody is better."""
    win_rate: float
    low: float
    high: float
    """The 95 % interval of the win rate."""
    elo: float | None
    elo_low: float | None
    elo_high: float | None
    """The same as Elo difference; None where it is not bounded."""
    games_that_count: float
    """As many independent games would be as sure: games of one opening depend on each other."""


def rate(pairs: Sequence[int]) -> Rating:
    """From the wins (0, 1 or 2) of each pair of games, which share an opening and change colours.

    The interval is Wilson's, for as many games as the pairs are worth: when the same player tends to win both games of
    an opening, two games say hardly more than one. It is never narrower than for games that are independent.
    """
    num_pairs = len(pairs)
    points = [wins / 2 for wins in pairs]
    share = fmean(points)
    spread = variance(points) if num_pairs > 1 else 0.0
    binomial = share * (1 - share)
    worth = min(max(binomial * num_pairs / spread if spread else 2.0 * num_pairs, num_pairs), 2.0 * num_pairs)
    # Where one player won everything no spread was seen, and each opening may count but once.
    worth = worth if binomial else float(num_pairs)
    low, high = wilson(share, worth)
    return Rating(
        num_games=2 * num_pairs,
        num_wins=sum(pairs),
        num_pairs_won=sum(wins == 2 for wins in pairs),
        num_pairs_lost=sum(wins == 0 for wins in pairs),
        win_rate=share,
        low=low,
        high=high,
        elo=elo(share),
        elo_low=elo(low),
        elo_high=elo(high),
        games_that_count=worth,
    )


def wilson(share: float, num_games: float) -> tuple[float, float]:
    """The 95 % interval of a share."""
    z2 = _CONFIDENCE_95**2 / num_games
    middle = (share + z2 / 2) / (1 + z2)
    half = math.sqrt(z2 * (share * (1 - share) + z2 / 4)) / (1 + z2)
    # Rounded errors must not make an interval look bounded that is not.
    return (0.0 if share <= 0 else middle - half), (1.0 if share >= 1 else middle + half)


def elo(share: float) -> float | None:
    """The Elo difference that makes this win rate likely; None for 0 and 1."""
    return 400 * math.log10(share / (1 - share)) if 0 < share < 1 else None
