"""What is a contest in an arena? Two words for players, how many games, and what came out, ready to be shown."""

from whet.base.model import FrozenModel
from whet.base.units import format_percent
from whet.device.open import open_device
from whet.recipes.hex.arena.match import Watch, play_match
from whet.recipes.hex.arena.openings import NUM_STONES, Kind, draw_openings
from whet.recipes.hex.arena.rating import Rating, rate
from whet.recipes.hex.config import DEFAULT_SIZE
from whet.recipes.hex.opponents import find_opponent


class Contest(FrozenModel):
    """Who met, on what, and how it ended for the first."""

    one: str
    two: str
    size: int
    openings: Kind
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
            f"{self.one} against {self.two} on {self.size}x{self.size}: {games}, both colours",
            f"won       {rating.num_wins} of {rating.num_games}: {format_percent(rating.win_rate, 1)}, 95 % interval "
            f"{format_percent(rating.low, 1)} to {format_percent(rating.high, 1)}",
            f"openings  {rating.num_pairs_won} won with both colours, {rating.num_pairs_lost} lost, {shared} shared",
            f"Elo       {_signed(rating.elo, rating.win_rate)}, {_signed(rating.elo_low, 0)} to "
            f"{_signed(rating.elo_high, 1)}",
        )


def hold_contest(
    one: str,
    two: str,
    *,
    num_games: int,
    size: int | None = None,
    openings: Kind = "even",
    num_stones: int | None = None,
    seed: int = 0,
    device: str = "auto",
    checkpoint: str = "last",
    watch: Watch | None = None,
) -> Contest:
    """Plays every opening twice; the size is the players' own, if they learned one."""
    opened = open_device(device).device
    players = [find_opponent(word, device=opened, checkpoint=checkpoint) for word in (one, two)]
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
