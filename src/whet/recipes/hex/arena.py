"""Matches between two players from balanced openings, with ratings."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, variance
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from whet.base.errors import UsageError
from whet.base.model import FrozenModel
from whet.base.units import format_percent
from whet.device.open import open_device
from whet.recipes.hex.config import DEFAULT_SIZE
from whet.recipes.hex.game.board import Boards
from whet.recipes.hex.game.players import Player, TwoDistancePlayer
from whet.recipes.hex.game.rules import as_positions, flip_perspective, mover_has_won, place_stones
from whet.recipes.hex.net_players import load_opponent

MatchProgress = Callable[[int, int], None]
"""Callback that receives the number of finished games and the total number of games."""


def play_match(
    one: Player, two: Player, openings: Boards, *, seed: int = 0, watch: MatchProgress | None = None
) -> NDArray[np.int64]:
    """Play each opening twice, with each player moving first once.

    Return how many of the two games player `one` won, as (openings,) with values 0 to 2. Players choose their best
    move. Ties are broken at random.
    """
    num = len(openings)
    boards = np.concatenate([openings, openings])
    games = np.arange(2 * num)
    is_one = games < num
    wins = np.zeros(num, dtype=np.int64)
    draw = np.random.default_rng(seed)
    while len(games):
        # Draw random numbers for finished games too, so that a game does not depend on the rest of the batch.
        noise = draw.random((2 * num, openings[0].size))[games]
        moves = np.zeros(len(games), dtype=np.int64)
        for player, mask in ((one, is_one), (two, ~is_one)):
            if mask.any():
                policy = player.analyze(as_positions(boards[mask])).policy
                moves[mask] = (noise[mask] * (policy == policy.max(1, keepdims=True))).argmax(1)
        after = place_stones(boards, moves)
        is_finished = mover_has_won(after)
        np.add.at(wins, games[is_finished & is_one] % num, 1)
        boards, games, is_one = flip_perspective(after[~is_finished]), games[~is_finished], ~is_one[~is_finished]
        if watch is not None:
            watch(2 * num - len(games), 2 * num)
    return wins


OpeningKind = Literal["random", "even"]
NUM_STONES: dict[OpeningKind, int] = {"random": 2, "even": 3}
"""Default number of stones in an opening. After three stones the mover has one fewer, so more openings are even."""
_MAX_TRIES = 20
_EVEN_TOLERANCE = 0.05
"""Tolerance around a win probability of 0.5. Two-distances are integers, so only exact ties are within it."""


def draw_openings(num: int, *, size: int, num_stones: int, seed: int, kind: OpeningKind = "random") -> Boards:
    """Return `num` distinct undecided boards after random alternating moves, from the mover's perspective.

    A board and its rotation by 180 degrees count as distinct. Raise UsageError if fewer openings were found.
    """
    draw = np.random.default_rng([seed, size, num_stones])
    boards = np.zeros((0, size, size), dtype=np.int8)
    for _ in range(_MAX_TRIES):
        drawn = random_boards(4 * num, size=size, num_stones=num_stones, draw=draw)
        boards = np.concatenate([boards, drawn[are_even(drawn)] if kind == "even" else drawn])
        _, first = np.unique(boards.reshape(len(boards), size**2), axis=0, return_index=True)
        boards = boards[np.sort(first)]
        if len(boards) >= num:
            return boards[:num]
    more_stones = f"--stones {num_stones + 1 if len(boards) else 2}"
    other = "--openings random" if kind == "even" else more_stones
    raise UsageError(
        "there are not enough openings",
        got=f"{num} {kind} openings of {num_stones} stones on size {size}; there are {len(boards)}",
        try_=f"--games {2 * len(boards)}, or {other}" if len(boards) else other,
    )


def are_even(boards: Boards) -> NDArray[np.bool_]:
    """Return which boards the two-distance player considers even, (batch,). Boards are from the mover's perspective."""
    if not len(boards):
        return np.zeros(0, dtype=bool)
    return np.asarray(np.abs(TwoDistancePlayer().analyze(as_positions(boards)).value - 0.5) < _EVEN_TOLERANCE)


def random_boards(num: int, *, size: int, num_stones: int, draw: np.random.Generator) -> Boards:
    """Return up to `num` undecided boards after random alternating moves, from the mover's perspective."""
    boards = np.zeros((num, size, size), dtype=np.int8)
    for _ in range(num_stones):
        scores = draw.random((len(boards), size * size)) * (boards.reshape(len(boards), size**2) == 0)
        boards = place_stones(boards, scores.argmax(1))
        boards = flip_perspective(boards[~mover_has_won(boards)])
    return boards


# The 97.5 % quantile of the standard normal distribution.
_CONFIDENCE_95 = 1.959964


class Rating(FrozenModel):
    """The rating of the first player: win rate and Elo difference with confidence intervals."""

    num_games: int
    num_wins: int
    num_pairs_won: int
    num_pairs_lost: int
    """Number of openings that the first player lost with both colors. Shared openings say nothing about strength."""
    win_rate: float
    low: float
    high: float
    """Upper bound of the 95 % confidence interval of the win rate."""
    elo: float | None
    """Estimated Elo difference, or None if the first player won all games or none."""
    elo_low: float | None
    elo_high: float | None
    """Upper bound of the Elo difference, or None if unbounded."""
    effective_games: float
    """Number of independent games that would give the same certainty. The two games of an opening are correlated."""


def rate(pairs: Sequence[int]) -> Rating:
    """Compute a rating from the wins (0, 1, 2) of each pair of games, which share an opening with swapped colors.

    The result has the Wilson score interval for the effective number of games: if the same player tends to win both
    games of an opening, two games carry hardly more information than one. The interval is never narrower than for
    independent games.
    """
    num_pairs = len(pairs)
    points = [wins / 2 for wins in pairs]
    share = fmean(points)
    spread = variance(points) if num_pairs > 1 else 0.0
    binomial = share * (1 - share)
    # Design effect: divide the variance of independent games by the variance over pairs. Clamp to [pairs, games].
    effective = min(max(binomial * num_pairs / spread if spread else 2.0 * num_pairs, num_pairs), 2.0 * num_pairs)
    # If one player won all games, the correlation is unknown, so each opening counts as one game.
    effective = effective if binomial else float(num_pairs)
    low, high = wilson(share, effective)
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
        effective_games=effective,
    )


def wilson(share: float, num_games: float) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a proportion."""
    z2 = _CONFIDENCE_95**2 / num_games
    middle = (share + z2 / 2) / (1 + z2)
    half = math.sqrt(z2 * (share * (1 - share) + z2 / 4)) / (1 + z2)
    # Return exactly 0 and 1 as bounds. With a rounding error, an unbounded Elo interval would look bounded.
    return (0.0 if share <= 0 else middle - half), (1.0 if share >= 1 else middle + half)


def elo(share: float) -> float | None:
    """Return the Elo difference that corresponds to a win rate, or None if the win rate is 0 or 1."""
    return 400 * math.log10(share / (1 - share)) if 0 < share < 1 else None


class Contest(FrozenModel):
    """A match that has been played: its players, settings and result."""

    one: str
    two: str
    size: int
    openings: OpeningKind
    num_stones: int
    """Number of stones in an opening."""
    seed: int
    device: str
    rating: Rating

    @property
    def lines(self) -> tuple[str, ...]:
        """The result as lines of text."""
        rating = self.rating
        num_pairs = rating.num_games // 2
        shared = num_pairs - rating.num_pairs_won - rating.num_pairs_lost
        games = f"{rating.num_games} games, {num_pairs} {self.openings} openings of {self.num_stones} stones"
        return (
            f"{self.one} against {self.two} on {self.size}x{self.size}: {games}, both colors",
            f"won       {rating.num_wins} of {rating.num_games}: {format_percent(rating.win_rate, 1)}, 95 % interval "
            f"{format_percent(rating.low, 1)} to {format_percent(rating.high, 1)}",
            f"openings  {rating.num_pairs_won} won with both colors, {rating.num_pairs_lost} lost, {shared} shared",
            f"Elo       {_signed(rating.elo, rating.win_rate)}, {_signed(rating.elo_low, 0)} to "
            f"{_signed(rating.elo_high, 1)}",
        )


def hold_contest(
    one: str,
    two: str,
    *,
    num_games: int,
    size: int | None = None,
    openings: OpeningKind = "even",
    num_stones: int | None = None,
    seed: int = 0,
    device: str = "auto",
    checkpoint: str = "last",
    watch: MatchProgress | None = None,
) -> Contest:
    """Load two players and play a match.

    The default board size is the size that a net was trained on: that of `one`, else that of `two`, else DEFAULT_SIZE.
    Raise UsageError if the number of games is odd.
    """
    if num_games % 2:
        raise UsageError(
            "the number of games must be even, because every opening is played twice",
            got=f"--games {num_games}",
            try_=f"--games {num_games + 1}",
        )
    opened = open_device(device).device
    players = [load_opponent(name, device=opened, checkpoint=checkpoint) for name in (one, two)]
    size = size or next((player.size for player in players if player.size), DEFAULT_SIZE)
    num_stones = NUM_STONES[openings] if num_stones is None else num_stones
    boards = draw_openings(num_games // 2, size=size, num_stones=num_stones, seed=seed, kind=openings)
    wins = play_match(players[0].player, players[1].player, boards, seed=seed, watch=watch)
    return Contest(
        one=one,
        two=two,
        size=size,
        openings=openings,
        num_stones=num_stones,
        seed=seed,
        device=opened.kind,
        rating=rate(wins.tolist()),
    )


def _signed(elo: float | None, share: float) -> str:
    if elo is not None:
        return f"{elo:+.0f}"
    return "+infinity" if share > 0.5 else "-infinity"
