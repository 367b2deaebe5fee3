"""Matches between two players from balanced openings, with ratings."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, variance
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from whet.base.errors import UsageError
from whet.base.model import FrozenModel
from whet.base.units import format_percent
from whet.device.open import open_device
from whet.recipes.hex.config import DEFAULT_SIZE
from whet.recipes.hex.game.board import Boards
from whet.recipes.hex.game.players import Analysis, TwoDistancePlayer
from whet.recipes.hex.game.rules import Positions, as_positions, flip_perspective, mover_has_won, place_stones
from whet.recipes.hex.net_players import load_opponent

MatchProgress = Callable[[int, int], None]
"""Told how many games are over, and of how many."""


class Contestant(Protocol):
    """Who can play; `whet.recipes.hex.game.players.Player` without its name."""

    def analyze(self, positions: Positions) -> Analysis: ...


def play_match(
    one: Contestant, two: Contestant, openings: Boards, *, seed: int = 0, watch: MatchProgress | None = None
) -> NDArray[np.int64]:
    """The wins (0, 1 or 2) of the first player from each opening: once it is to move there, once the other is.

    Each player takes its best move; where several are as good, one is drawn.
    """
    num = len(openings)
    boards = np.concatenate([openings, openings])
    games = np.arange(2 * num)
    is_one = games < num
    wins = np.zeros(num, dtype=np.int64)
    draw = np.random.default_rng(seed)
    while len(games):
        # Drawn for all games, over or not, so that a game is the same whatever the others do.
        luck = draw.random((2 * num, openings[0].size))[games]
        moves = np.zeros(len(games), dtype=np.int64)
        for player, mask in ((one, is_one), (two, ~is_one)):
            if mask.any():
                shares = player.analyze(as_positions(boards[mask])).policy
                moves[mask] = (luck[mask] * (shares == shares.max(1, keepdims=True))).argmax(1)
        after = place_stones(boards, moves)
        is_over = mover_has_won(after)
        np.add.at(wins, games[is_over & is_one] % num, 1)
        boards, games, is_one = flip_perspective(after[~is_over]), games[~is_over], ~is_one[~is_over]
        if watch is not None:
            watch(2 * num - len(games), 2 * num)
    return wins


OpeningKind = Literal["random", "even"]
NUM_STONES: dict[OpeningKind, int] = {"random": 2, "even": 3}
"""Of an opening, where nobody says how many. After three, who is to move has a stone less: that is nearer to even."""
_EVEN_WITHIN = 0.05
"""Of a chance of one half. Two-distances are whole numbers: only those who are exactly a move apart are so near."""


def draw_openings(num: int, *, size: int, num_stones: int, seed: int, kind: OpeningKind = "random") -> Boards:
    """Boards after random moves by both in turn, as their movers see them; none is decided, and none comes twice.

    Boards that are half a turn apart count as two.
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
        "there are not so many openings",
        got=f"{num} {kind} openings of {num_stones} stones on size {size}; {len(boards)} are there",
        try_=f"--games {2 * len(boards)}, or {other}" if len(boards) else other,
    )


_MAX_TRIES = 20


def are_even(boards: Boards) -> NDArray[np.bool_]:
    """Of boards as their movers see them: whether the two-distance player gives both sides the same chance."""
    if not len(boards):
        return np.zeros(0, dtype=bool)
    return np.asarray(np.abs(TwoDistancePlayer().analyze(as_positions(boards)).value - 0.5) < _EVEN_WITHIN)


def random_boards(num: int, *, size: int, num_stones: int, draw: np.random.Generator) -> Boards:
    """Boards after random moves by both in turn, as their movers see them; decided ones are left out."""
    boards = np.zeros((num, size, size), dtype=np.int8)
    for _ in range(num_stones):
        chance = draw.random((len(boards), size * size)) * (boards.reshape(len(boards), size**2) == 0)
        boards = place_stones(boards, chance.argmax(1))
        boards = flip_perspective(boards[~mover_has_won(boards)])
    return boards


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
    """From the wins (0, 1 or 2) of each pair of games, which share an opening and change colors.

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


class Contest(FrozenModel):
    """Who met, on what, and how it ended for the first."""

    one: str
    two: str
    size: int
    openings: OpeningKind
    num_stones: int
    """Of an opening."""
    seed: int
    device: str
    rating: Rating

    @property
    def lines(self) -> tuple[str, ...]:
        """For a person."""
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
    """Plays every opening twice; the size is the players' own, if they learned one."""
    opened = open_device(device).device
    players = [load_opponent(word, device=opened, checkpoint=checkpoint) for word in (one, two)]
    size = size or next((player.size for player in players if player.size), DEFAULT_SIZE)
    num_stones = NUM_STONES[openings] if num_stones is None else num_stones
    boards = draw_openings((num_games + 1) // 2, size=size, num_stones=num_stones, seed=seed, kind=openings)
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
    return "beyond measure" if share > 0.5 else "below measure"
