"""Tree search, matches, openings and ratings."""

import json
import math

import numpy as np
import pytest

from whet.base.errors import UsageError
from whet.recipes.hex.arena import NUM_STONES, draw_openings, elo, play_match, rate, wilson
from whet.recipes.hex.game.board import BLUE, RED, Boards
from whet.recipes.hex.game.players import Analysis, RandomPlayer, potentials
from whet.recipes.hex.game.rules import Positions, as_positions, mover_has_won
from whet.recipes.hex.search import SearchOptions, Trees, add_noise, search_moves

pytestmark = pytest.mark.torch


def knows_nothing(boards: Boards) -> tuple[np.ndarray, np.ndarray]:
    share = RandomPlayer().analyze(as_positions(boards)).policy
    return share, np.full(len(boards), 0.5, dtype=np.float32)


def has_opinions(boards: Boards) -> tuple[np.ndarray, np.ndarray]:
    """Derived from the board itself, so it is always the same."""
    draws = [np.random.default_rng([int(cell) for cell in board.flat]) for board in boards]
    shares = np.stack([draw.random(boards[0].size) for draw in draws]) * (boards.reshape(len(boards), -1) == 0)
    wins = boards.reshape(len(boards), -1) @ np.arange(1, boards[0].size + 1) % 97 / 97
    return (shares / np.maximum(shares.sum(1, keepdims=True), 1e-9)).astype(np.float32), wins.astype(np.float32)


def board(*rows: str) -> Boards:
    return np.array([[".xo".index(cell) for cell in row] for row in rows], dtype=np.int8)[None]


def test_search_takes_a_win_in_one_and_blocks_a_loss_in_one() -> None:
    wins = board("x..", "x..", "...")
    result = search_moves(wins, knows_nothing, SearchOptions(simulations=64))
    assert mover_has_won(_with(wins, int(result.visits.argmax(1)[0])))[0]
    assert result.win[0] > 0.8
    # The opponent connects left and right next; only one cell prevents it.
    loses = board(".....", ".x...", "oooo.", ".....", "..x..")
    loses[0, 1, 4], loses[0, 3, 4] = BLUE, BLUE
    assert search_moves(loses, knows_nothing, SearchOptions(simulations=1000)).visits.argmax(1)[0] == 2 * 5 + 4


def _with(boards: Boards, move: int) -> Boards:
    after = boards.copy()
    after.reshape(1, -1)[0, move] = BLUE
    return after


def test_a_long_search_finds_that_the_middle_wins_3x3() -> None:
    """For any reply, the center wins: for its owner to move, and against the opponent to move."""
    middle = np.zeros((8, 3, 3), dtype=np.int8)
    middle[:, 1, 1] = BLUE
    middle.reshape(8, -1)[np.arange(8), [0, 1, 2, 3, 5, 6, 7, 8]] = RED
    assert (search_moves(middle, knows_nothing, SearchOptions(simulations=600)).win > 0.8).all()
    against = np.zeros((1, 3, 3), dtype=np.int8)
    against[:, 1, 1] = RED
    assert search_moves(against, knows_nothing, SearchOptions(simulations=1500)).win[0] < 0.35


def test_visits_sum_to_simulations_on_empty_cells() -> None:
    boards = draw_openings(9, size=4, num_stones=3, seed=1)
    result = search_moves(boards, knows_nothing, SearchOptions(simulations=40))
    assert (result.visits.sum(1) == 40).all()
    assert (result.visits[boards.reshape(9, -1) != 0] == 0).all()
    np.testing.assert_allclose(result.shares.sum(1), 1, rtol=1e-6)


def test_search_is_deterministic_and_independent_of_the_batch() -> None:
    boards = draw_openings(7, size=5, num_stones=4, seed=2)
    how = SearchOptions(simulations=50)
    together = search_moves(boards, has_opinions, how)
    for row in (0, 3, 6):
        alone = search_moves(boards[row : row + 1], has_opinions, how)
        assert (alone.visits[0] == together.visits[row]).all()
        assert alone.win[0] == together.win[row]


def test_noise_depends_on_the_seed_and_spreads_visits() -> None:
    boards = np.zeros((2, 5, 5), dtype=np.int8)
    how = SearchOptions(simulations=30, noise_fraction=0.5)
    first, again, other = (
        search_moves(boards, has_opinions, how, draw=np.random.default_rng(seed)).visits for seed in (1, 1, 2)
    )
    assert (first == again).all()
    assert (first != other).any()


def test_noise_is_for_legal_moves_only() -> None:
    boards = draw_openings(3, size=4, num_stones=5, seed=0)
    trees = Trees(boards, num_nodes=1)
    add_noise(trees, SearchOptions(noise_fraction=1.0), np.random.default_rng(0))
    np.testing.assert_allclose(trees.priors[:, 0].sum(1), 1, rtol=1e-5)
    assert (trees.priors[:, 0][boards.reshape(3, -1) != 0] == 0).all()


class FirstFree:
    """Takes the first free cell: the same every time."""

    def analyze(self, positions: Positions) -> Analysis:
        policy = np.zeros((len(positions), positions.size**2), dtype=np.float32)
        policy[np.arange(len(positions)), (positions.boards.reshape(len(positions), -1) == 0).argmax(1)] = 1
        return Analysis(policy, np.full(len(positions), 0.5, dtype=np.float32))


def test_player_against_itself_wins_one_game_of_each_opening() -> None:
    openings = draw_openings(20, size=5, num_stones=2, seed=0)
    assert (play_match(FirstFree(), FirstFree(), openings) == 1).all()


def test_better_player_wins_a_match_deterministically() -> None:
    class Searcher:
        def analyze(self, positions: Positions) -> Analysis:
            assert (positions.movers == BLUE).all()
            result = search_moves(positions.boards, knows_nothing, SearchOptions(simulations=60))
            return Analysis(result.shares, result.win)

    openings = draw_openings(10, size=4, num_stones=2, seed=0)
    wins = play_match(Searcher(), RandomPlayer(), openings, seed=3)
    assert wins.sum() >= 17
    assert (play_match(Searcher(), RandomPlayer(), openings, seed=3) == wins).all()
    assert (2 - play_match(RandomPlayer(), Searcher(), openings, seed=3)).sum() >= 17


def test_openings_are_distinct_undecided_and_too_few_are_an_error() -> None:
    openings = draw_openings(300, size=5, num_stones=2, seed=0)
    assert len({made.tobytes() for made in openings}) == 300
    assert not mover_has_won(openings).any()
    assert (openings == BLUE).sum() == (openings == RED).sum() == 300
    with pytest.raises(UsageError, match="not enough openings"):
        draw_openings(30, size=5, num_stones=1, seed=0)
    # A board full of stones is decided.
    with pytest.raises(UsageError, match="there are 0"):
        draw_openings(3, size=3, num_stones=20, seed=0)
    assert len(draw_openings(1, size=5, num_stones=0, seed=0)) == 1


@pytest.mark.parametrize("size", [4, 5, 11])
def test_in_even_openings_the_mover_is_one_move_behind_and_in_random_ones_mostly_not(size: int) -> None:
    """Its shortest path is one longer than the opponent's, and the move makes up for it."""
    is_even = {}
    for kind, num_stones in NUM_STONES.items():
        openings = draw_openings(60, size=size, num_stones=num_stones, seed=1, kind=kind)
        assert len({made.tobytes() for made in openings}) == 60
        assert not mover_has_won(openings).any()
        assert ((openings != 0).sum((1, 2)) == num_stones).all()
        own, others = potentials(as_positions(openings))
        is_even[kind] = own.min(1) - others.min(1) == 1
    assert is_even["even"].all()
    assert is_even["random"].mean() < 0.5
    with pytest.raises(UsageError, match="even openings of 2 stones on size 3; there are 12") as refused:
        draw_openings(13, size=3, num_stones=2, seed=0, kind="even")
    assert refused.value.try_ == "--games 24, or --openings random"


def test_intervals_are_wilson_and_decisive_openings_count_once() -> None:
    low, high = wilson(0.6, 100)
    assert (round(low, 4), round(high, 4)) == (0.5020, 0.6906)
    alike = rate([2, 2, 0, 2, 0, 2, 2, 0] * 10)
    assert alike.effective_games == pytest.approx(80, rel=0.02)
    mixed = rate([2, 1, 1, 2, 1, 1, 1, 0] * 10)
    assert mixed.effective_games == 160
    assert (mixed.low, mixed.high) == wilson(mixed.win_rate, 160)
    assert (mixed.num_pairs_won, mixed.num_pairs_lost) == (20, 10)
    everything = rate([2] * 50)
    assert (everything.effective_games, everything.elo, everything.elo_high) == (50, None, None)
    assert everything.low == pytest.approx(0.9286, abs=1e-3)
    json.dumps(everything.as_json(), allow_nan=False)
    assert elo(0.64) == pytest.approx(400 * math.log10(16 / 9))
